// Gradient of what a cross multiplies, in one pass that quantizes it to FP8 both ways, as the next
// GEMMs of a backward pass read it.
//
//     dy = (dd + more + last) * x0
//
// with as many terms as TERMS says, and without x0 the gradient of any layer that two products read.
// dy is float32 until it is rounded to FP8; in its column sums it is
// not rounded at all.
//
//     terms, x0:    [rows, columns], bfloat16 or float16, by tensor maps
//     data, scale:  of dy: [rows, columns] FP8, and of row r and 128 columns c at
//                   scale[c * scale_stride + r]
//     across, across_scale: the same of the transpose of dy
//     parts:        float32 [tiles of 128 rows, columns], for quantize_sums.cu
//
// Nothing but the bytes should take time: 6 an element with one term. A block stays on its SM and
// takes every so many-th tile of 128 x 128. Bulk copies bring the operands of the next tiles into a
// ring of boxes of 32 KB while two teams of 256 threads work on two tiles, 8 rows of 8 columns a
// thread in registers. A team gives its boxes back as soon as it has read them, so that copies never
// wait for what it computes or stores. Neighbors take tiles along a row; in bands of 4 to 32 tiles, in
// which what goes across meets its neighbors in the L2, an H200 was no faster at any of 6 sizes, and
// neither was it with teams of 512 threads, 4 rows a thread.
//
// Macros besides those of quantize.cuh, from cross_backward.py:
//
//     TERMS       of the gradient, 1 to 3
//     FACTOR      1 where there is x0
//     SUMS        1 to write parts
//     IS_FLOAT16  1 where operands are float16, 0 for bfloat16
//     BOXES       of the ring, at least TERMS + FACTOR
#include "cross_backward_ptx.cuh"
#include "folds.cuh"
#include "half_ptx.cuh"
#include "hopper.cuh"
#include "quantize.cuh"
#include "quantize_sums.cuh"

constexpr int SIDE = 128, HELD = 8;
constexpr int CHUNKS = SIDE / CHUNK;          // of a row of a tile: threads that share it
constexpr int TEAM = CHUNKS * (SIDE / HELD);  // threads
constexpr int TEAMS = 2, WARPS = TEAM / 32;
constexpr int THREADS = TEAMS * TEAM + 32;    // the last warp brings operands
constexpr int OPERANDS = TERMS + FACTOR;
constexpr int ROW_BYTES = SIDE * 2, BOX_BYTES = SIDE * ROW_BYTES;
// Of a column: its sum, and its largest magnitude. A chunk takes 9 places, against conflicts.
constexpr int PITCH = SIDE + CHUNKS;
constexpr int LIST_BYTES = (SUMS + 1) * WARPS * PITCH * 4;
constexpr int TURNED_BYTES = SIDE * SIDE;
constexpr int SCRATCH_BYTES = TURNED_BYTES;  // of a team: lists, then what goes across
constexpr int SCRATCH_AT = BOXES * BOX_BYTES;
constexpr int INVERSE_AT = SCRATCH_AT + TEAMS * SCRATCH_BYTES;
constexpr int TURNS_AT = INVERSE_AT + TEAMS * SIDE * 4;  // barriers of the boxes
constexpr int TURN_BYTES = 24;
static_assert(CHUNK == 8 && HELD == 8, "16 bytes of 8 rows");
static_assert(LIST_BYTES <= SCRATCH_BYTES, "lists lie where columns are turned");
static_assert(OPERANDS <= BOXES, "a team waits for all boxes of its tile");

struct alignas(16) Piece {
    unsigned word[4];
};

__device__ __forceinline__ float value(const unsigned (&word)[4], int index) {
    if constexpr (IS_FLOAT16) return from_half(index % 2 ? word[index / 2] >> 16 : word[index / 2]);
    return __uint_as_float(element(word, index));
}

// Where boxes of the ring are, and their barriers. `number` counts boxes from the first tile on.
struct Ring {
    unsigned base;

    __device__ __forceinline__ unsigned box(int number) const {
        return base + number % BOXES * BOX_BYTES;
    }
    // That its copy is on the way, and has arrived. A team waits for both: while the box still waits
    // for what the other team is to read before, `full` cannot be told from one turn later.
    __device__ __forceinline__ unsigned sent(int number) const {
        return base + TURNS_AT + number % BOXES * TURN_BYTES;
    }
    __device__ __forceinline__ unsigned full(int number) const { return sent(number) + 8; }
    __device__ __forceinline__ unsigned empty(int number) const { return sent(number) + 16; }
    static __device__ __forceinline__ unsigned parity(int number) { return number / BOXES & 1; }
};

// What a tile of this block holds, in registers: 8 rows of 8 columns a thread.
__device__ __forceinline__ void read_tile(
    const Ring& ring, int first_box, int inside, float (&made)[HELD][CHUNK]) {
    for (int i = first_box; i < first_box + OPERANDS; ++i) {
        wait(ring.sent(i), Ring::parity(i));
        wait(ring.full(i), Ring::parity(i));
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        unsigned word[4];
        load_shared_16_bytes(ring.box(first_box) + inside + i * ROW_BYTES, word);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) made[i][j] = value(word, j);
#pragma unroll
        for (int term = 1; term < TERMS; ++term) {
            load_shared_16_bytes(ring.box(first_box + term) + inside + i * ROW_BYTES, word);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) made[i][j] += value(word, j);
        }
        if constexpr (FACTOR) {
            load_shared_16_bytes(ring.box(first_box + TERMS) + inside + i * ROW_BYTES, word);
        }
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const float v = FACTOR ? made[i][j] * value(word, j) : made[i][j];
            made[i][j] = fmaf(v, 0.0f, v);  // infinity is NaN in FP8, and no part of a scale
        }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        for (int i = 0; i < OPERANDS; ++i) arrive(ring.empty(first_box + i));
    }
}

// What goes into sums and scales of columns: of 8 rows, then of 16, by warp.
__device__ __forceinline__ void list_columns(
    const float (&made)[HELD][CHUNK], float* lists, int warp, int chunk) {
#pragma unroll
    for (int j = 0; j < CHUNK; j += 2) {
        const int place = warp * PITCH + chunk * (CHUNK + 1) + j + (threadIdx.x / 16 % 2);
        float largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) largest[k] = fmaxf(largest[k], fabsf(made[i][j + k]));
        }
        fold<Largest, 2>(largest, 16);
        lists[place] = largest[0];
        if constexpr (SUMS) {
            float sum[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                Adder adder;
#pragma unroll
                for (int i = 0; i < HELD; ++i) adder.add(i, made[i][j + k]);
                sum[k] = adder.pending[3];
            }
            fold<Sum, 2>(sum, 16);
            lists[WARPS * PITCH + place] = sum[0];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) cross_backward(
    unsigned char* data, float* scale, unsigned char* across, float* across_scale, float* parts,
    int rows, int columns, long long data_stride, long long across_stride, long long scale_stride,
    long long across_scale_stride, const __grid_constant__ TensorMap dd_map
#if TERMS > 1
    , const __grid_constant__ TensorMap more_map
#endif
#if TERMS > 2
    , const __grid_constant__ TensorMap last_map
#endif
#if FACTOR
    , const __grid_constant__ TensorMap x0_map
#endif
) {
    extern __shared__ char shared[];
    const Ring ring{shared_address(shared)};
    const int row_tiles = (columns + SIDE - 1) / SIDE;
    const int tiles = (rows + SIDE - 1) / SIDE * row_tiles;
    if (threadIdx.x == 0) {
        for (int i = 0; i < BOXES; ++i) {
            initialize_barrier(ring.sent(i), 1);
            initialize_barrier(ring.full(i), 1);
            initialize_barrier(ring.empty(i), WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    begin_in_turn();

    if (threadIdx.x >= TEAMS * TEAM) {
        if (threadIdx.x % 32 != 0) return;
        int number = 0;
        const auto bring = [&](const TensorMap& map, int x, int y) {
            wait(ring.empty(number), Ring::parity(number) ^ 1);
            // What lies outside of a tensor counts, and reads as 0.
            expect_bytes(ring.full(number), BOX_BYTES);
            load_box(ring.box(number), map, ring.full(number), x, y);
            arrive(ring.sent(number));
            ++number;
        };
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int x = tile % row_tiles * SIDE, y = tile / row_tiles * SIDE;
            bring(dd_map, x, y);
#if TERMS > 1
            bring(more_map, x, y);
#endif
#if TERMS > 2
            bring(last_map, x, y);
#endif
#if FACTOR
            bring(x0_map, x, y);
#endif
        }
        return;
    }

    const int team = __shfl_sync(0xffffffffu, threadIdx.x / TEAM, 0);  // known to be uniform
    const int member = threadIdx.x % TEAM, warp = member / 32;
    const int chunk = member % CHUNKS, band = member / CHUNKS;  // of 8 rows
    const int inside = band * HELD * ROW_BYTES + chunk * 16;
    char* scratch = shared + SCRATCH_AT + team * SCRATCH_BYTES;
    float* lists = reinterpret_cast<float*>(scratch);
    float* column_inverse = reinterpret_cast<float*>(shared + INVERSE_AT) + team * SIDE;

    int turn = team;
    for (int tile = blockIdx.x + team * gridDim.x; tile < tiles;
         tile += TEAMS * gridDim.x, turn += TEAMS) {
        const int tile_row = tile / row_tiles, tile_column = tile % row_tiles * SIDE;
        const int row = tile_row * SIDE + band * HELD, rows_left = rows - row;
        const int column = tile_column + chunk * CHUNK;
        float made[HELD][CHUNK];
        read_tile(ring, turn * OPERANDS, inside, made);
        synchronize_team<TEAM>(team);  // all have written what went across of the tile before
        list_columns(made, lists, warp, chunk);

        // As it lies: scales of rows, then their elements.
        float in_row[HELD], inverse[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            in_row[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) in_row[i] = fmaxf(in_row[i], fabsf(made[i][j]));
        }
        const float decode = decode_scale(__float_as_uint(of_rows<Largest>(in_row)));
        if (chunk % 2 == 0 && chunk / 2 < rows_left) {
            scale[tile_column / SIDE * scale_stride + row + chunk / 2] = decode;
        }
        spread(__frcp_rn(decode), inverse);
        unsigned char* to = data + row * data_stride + column;
#pragma unroll
        for (int i = 0; i < HELD; ++i, to += data_stride) {
            float quotient[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) quotient[j] = made[i][j] * inverse[i];
            unsigned bytes[2];
            encode(quotient, bytes);
            store_8_bytes_if(column < columns && i < rows_left, to, bytes);
        }

        // Columns: a thread has one, of its half of the team.
        synchronize_team<TEAM>(team);
        {
            const int mine = member % SIDE, to_column = tile_column + mine;
            const bool sums = SUMS && member >= SIDE;
            float of_warp[WARPS];
            if (sums || member < SIDE) {
#pragma unroll
                for (int i = 0; i < WARPS; ++i) {
                    of_warp[i] = lists[((sums ? WARPS : 0) + i) * PITCH + mine + mine / CHUNK];
                }
            }
            if (sums) {
                const float sum = sum_by_twos<WARPS>(of_warp);
                if (to_column < columns) {
                    parts[static_cast<long long>(tile_row) * columns + to_column] = sum;
                }
            } else if (member < SIDE) {
                float largest = of_warp[0];
#pragma unroll
                for (int i = 1; i < WARPS; ++i) largest = fmaxf(largest, of_warp[i]);
                const float of_column = decode_scale(__float_as_uint(largest));
                column_inverse[mine] = __frcp_rn(of_column);
                if (to_column < columns) {
                    across_scale[tile_row * across_scale_stride + to_column] = of_column;
                }
            }
        }
        synchronize_team<TEAM>(team);

        // The transpose, as in quantize_tile.cu: 8 bytes of a column at a time through shared memory,
        // permuted so that no bank has two at once.
        unsigned long long* turned = reinterpret_cast<unsigned long long*>(scratch);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            const float of_column = column_inverse[chunk * CHUNK + j];
            float quotient[HELD];
#pragma unroll
            for (int i = 0; i < HELD; ++i) quotient[i] = made[i][j] * of_column;
            unsigned bytes[2];
            encode(quotient, bytes);
            turned[(chunk * CHUNK + j) * (SIDE / HELD) + (band ^ chunk)] =
                bytes[0] | static_cast<unsigned long long>(bytes[1]) << 32;
        }
        synchronize_team<TEAM>(team);
#pragma unroll
        for (int place = member; place < SIDE * SIDE / 16; place += TEAM) {
            const int from_column = place / 8, two = place % 8 * 2;  // bands
            const int permuted = from_column / CHUNK;
            const int to_row = tile_column + from_column;
            const int first = tile_row * SIDE + two * HELD, left = rows - first;
            if (to_row >= columns) continue;
            unsigned char* there = across + to_row * across_stride + first;
            if (left >= 16) {
                Piece piece = reinterpret_cast<const Piece*>(
                    scratch)[from_column * 8 + (two ^ (permuted & ~1)) / 2];
                if (permuted & 1) {
                    piece = Piece{{piece.word[2], piece.word[3], piece.word[0], piece.word[1]}};
                }
                *reinterpret_cast<Piece*>(there) = piece;
                continue;
            }
            const unsigned char* byte = reinterpret_cast<const unsigned char*>(scratch);
#pragma unroll 1
            for (int i = 0; i < left; ++i) {
                there[i] = byte[(from_column * 16 + (two + i / 8 ^ permuted)) * 8 + i % 8];
            }
        }
    }
}
