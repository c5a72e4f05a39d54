// Gradient of a relu's input in FP8 both ways, as the products of a backward pass read it, and the
// relu's output as the gradient of the next weight reads it; byte for byte as lokakern.numerics.
//
//     dz = y <= 0 ? 0 : dy        s = max(rn(amax / MAX), 2^-126),  1 where amax is 0
//                                 q = cast(rn(x / s))
//
//     dy, y:        [rows, columns], bfloat16, by tensor maps; multiples of 128
//     data:         of dz, [rows, columns] FP8, with a scale of each row at scale[row]
//     across:       of dz, [columns, rows] FP8; of column c and 128 rows h at
//                   across_scale[h * across_scale_stride + c]
//     y_across:     of y, [columns, rows] FP8; of 128 columns g and 128 rows h at
//                   y_scale[g * y_scale_stride + h], if OUTPUT
//
// Nothing but the bytes should take time: 4 read and 3 written an element, where a compiler's kernel
// and two quantizers read 8 and write 5. A scale of a row needs all of it, so the blocks of a cluster
// have 128 rows together. A team of 256 threads has a tile of 128 x 128 of them, 8 rows of 8 columns a
// thread in registers, and a box into which bulk copies bring y, then dy, then y of the next rows,
// each as soon as the team has read what was there. A team tells all others of its rows before it
// writes what goes across, so that it hardly waits for what they tell.
//
// Macros besides those of quantize.cuh, from relu_backward.py:
//
//     CLUSTER  blocks that share rows
//     TEAMS    of a block, of which the last block may need fewer
//     OUTPUT   1 to write y_across
#include "hopper.cuh"
#include "quantize.cuh"
#include "relu_backward_ptx.cuh"

constexpr int SIDE = 128, HELD = 8;           // rows of a thread
constexpr int CHUNKS = SIDE / CHUNK;          // of a row of a tile: threads that share it
constexpr int TEAM = CHUNKS * (SIDE / HELD);  // threads
constexpr int WARPS = TEAM / 32;              // of a team
constexpr int THREADS = TEAMS * TEAM;
constexpr int ROW_BYTES = SIDE * 2, BOX_BYTES = SIDE * ROW_BYTES;
constexpr int WORDS = SIDE / 2;               // of a row of a tile
constexpr int TURNED_AT = TEAMS * BOX_BYTES;  // what goes across, of each team
constexpr int TURNED_BYTES = SIDE * SIDE;
constexpr int TOLD_AT = TURNED_AT + TEAMS * TURNED_BYTES;  // in turn by two slots
constexpr int TEAMS_TOLD = 4;                              // places of a row: bfloat16
constexpr int TOLD_BYTES = SIDE * TEAMS_TOLD * 2;
constexpr int OWN_AT = TOLD_AT + 2 * TOLD_BYTES;
constexpr int BARRIERS_AT = OWN_AT + TEAMS * (WARPS * WORDS * 4 + WARPS * 4 + 6 * SIDE * 4);
static_assert(HALVES && IN_PLACE && WHOLE && CHUNK == 8, "16 bytes of 8 rows");
static_assert(TEAMS <= TEAMS_TOLD, "registers");

// Of a team, in shared memory.
struct Own {
    unsigned lists[WARPS][WORDS];  // largest magnitudes of columns, by warp
    unsigned of_warps[WARPS];
    // What `Divisor` keeps, of columns and rows; column c at c % 8 * 16 + c / 8, so that no bank has
    // two at once.
    float lift[2][SIDE], lifted[2][SIDE], reciprocal[2][SIDE];

    __device__ __forceinline__ void keep(int which, int place, const Divisor& divisor) {
        lift[which][place] = divisor.lift;
        lifted[which][place] = divisor.lifted;
        reciprocal[which][place] = divisor.reciprocal;
    }
};
enum { COLUMNS, ROWS };
static_assert(BARRIERS_AT == OWN_AT + TEAMS * sizeof(Own), "no gaps");

struct alignas(16) Piece {
    unsigned word[4];
};

struct Words {
    unsigned word[HELD][4];
};

// Largest magnitudes of the columns and rows of a thread, two in a word.
__device__ __forceinline__ void list(
    const Words& of, unsigned (&of_columns)[4], unsigned (&of_rows)[HELD / 2]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) of_columns[j] = 0;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        unsigned of_row = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned size = finite_magnitudes(of.word[i][j]);
            of_columns[j] = larger_halves(of_columns[j], size);
            of_row = larger_halves(of_row, size);
        }
        of_row = max(of_row >> 16, of_row & 0xffffu);
        of_rows[i / 2] = i % 2 == 0 ? of_row : of_rows[i / 2] | of_row << 16;
    }
}

__device__ __forceinline__ unsigned largest_of_four(const unsigned (&word)[4]) {
    return larger_halves(larger_halves(word[0], word[1]), larger_halves(word[2], word[3]));
}

// What `Divisor` keeps of a scale that amax made. Quotients are correctly rounded after one step, as a
// bfloat16 and the scale of one have 128 significands each, lifted or not (see quantize.cuh).
struct Kept {
    float lift, lifted, reciprocal;

    __device__ __forceinline__ explicit Kept(const Divisor& of)
        : lift(of.lift), lifted(of.lifted), reciprocal(of.reciprocal) {}
    __device__ __forceinline__ Kept(const Own& own, int which, int place)
        : lift(own.lift[which][place]), lifted(own.lifted[which][place]),
          reciprocal(own.reciprocal[which][place]) {}

    __device__ __forceinline__ float divide(unsigned bits) const {
        const float x = __fmul_rn(__uint_as_float(bits), lift);
        const float quotient = __fmul_rn(x, reciprocal);
        return __fmaf_rn(__fmaf_rn(quotient, lifted, -x), -reciprocal, quotient);
    }
};

// A column of this thread, 8 bytes, to its place among those of the team: permuted, so that no bank
// has two at once, and 16 bytes stay together.
__device__ __forceinline__ void turn(
    const Words& of, int j, const Kept& kept, int chunk, int band, char* turned) {
    float quotient[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) quotient[i] = kept.divide(element(of.word[i], j));
    unsigned bytes[2];
    encode(quotient, bytes);
    reinterpret_cast<unsigned long long*>(turned)[(chunk * CHUNK + j) * (SIDE / HELD) +
                                                 (band ^ chunk)] =
        bytes[0] | static_cast<unsigned long long>(bytes[1]) << 32;
}

// The columns of a tile from there to rows of the transpose.
__device__ __forceinline__ void write_turned(
    const char* turned, int member, unsigned char* to, long long stride) {
#pragma unroll
    for (int place = member; place < SIDE * SIDE / 16; place += TEAM) {
        const int column = place / 8, piece = place % 8, permuted = column / CHUNK;
        Piece found =
            reinterpret_cast<const Piece*>(turned)[column * 8 + (piece ^ permuted / 2)];
        if (permuted & 1) {
            found = Piece{{found.word[2], found.word[3], found.word[0], found.word[1]}};
        }
        *reinterpret_cast<Piece*>(to + column * stride + piece * 16) = found;
    }
}

// What was made from elements is made anew from then on, not kept in registers: 64 suffice.
__device__ __forceinline__ void forget(Words& of) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(of.word[i][j]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4 / TEAMS) relu_backward(
    unsigned char* data, float* scale, unsigned char* across, float* across_scale,
    unsigned char* y_across, float* y_scale, int rows, int columns, long long data_stride,
    long long across_stride, long long across_scale_stride, long long y_stride,
    long long y_scale_stride, const __grid_constant__ TensorMap dy_map,
    const __grid_constant__ TensorMap y_map) {
    extern __shared__ char shared[];
    const unsigned base = shared_address(shared);
    const int rank = CLUSTER > 1 ? rank_in_cluster() : 0;
    const int clusters = gridDim.x / CLUSTER, bands = rows / SIDE;
    const int team = __shfl_sync(0xffffffffu, threadIdx.x / TEAM, 0);  // known to be uniform
    const int member = threadIdx.x % TEAM, warp = member / 32;
    const int chunk = member % CHUNKS, band = member / CHUNKS;  // of 8 rows
    const int tile = rank * TEAMS + team, tiles = columns / SIDE;
    const unsigned box = base + team * BOX_BYTES, full = base + BARRIERS_AT + team * 8;
    Own& own = reinterpret_cast<Own*>(shared + OWN_AT)[team];
    const unsigned heard_at = base + BARRIERS_AT + TEAMS * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < TEAMS; ++i) initialize_barrier(base + BARRIERS_AT + i * 8, 1);
        for (int slot = 0; slot < 2; ++slot) initialize_barrier(heard_at + slot * 8, tiles);
        publish_barriers();
    }
    for (int i = threadIdx.x; i < 2 * TOLD_BYTES / 4; i += THREADS) {
        store_shared(base + TOLD_AT + i * 4, 0);  // of teams that there are not
    }
    synchronize_cluster();
    begin_in_turn();

    if (tile < tiles) {
        const int column = tile * SIDE;
        const unsigned mine = box + band * HELD * ROW_BYTES + chunk * 16;
        char* turned = shared + TURNED_AT + team * TURNED_BYTES;
        const auto bring = [&](const TensorMap& map, int at) {
            if (member == 0) {
                expect_bytes(full, BOX_BYTES);
                load_box(box, map, full, column, at * SIDE);
            }
        };
        int at = blockIdx.x / CLUSTER;
        bring(y_map, at);
        for (int turns = 0; at < bands; at += clusters, ++turns) {
            unsigned positive[2] = {};  // 16 words each: of word k the bits k below the signs
            {
                Words y;
                wait(full, 0);
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    load_shared_16_bytes(mine + i * ROW_BYTES, y.word[i]);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        positive[i / 4] |=
                            positive_halves(y.word[i][j]) & 0x80008000u >> (i % 4 * 4 + j);
                    }
                }
                if constexpr (OUTPUT) {
                    unsigned of_columns[4], of_rows[HELD / 2];
                    list(y, of_columns, of_rows);
                    unsigned largest = largest_of_four(of_columns);
                    largest = largest_of_warp(max(largest << 16, largest & 0xffff0000u));
                    if (threadIdx.x % 32 == 0) own.of_warps[warp] = largest;
                }
                synchronize_team<TEAM>(team);
                bring(dy_map, at);
                if constexpr (OUTPUT) {
                    unsigned largest = 0;
#pragma unroll
                    for (int i = 0; i < WARPS; ++i) largest = max(largest, own.of_warps[i]);
                    const float decode = decode_scale(largest);
                    if (member == 0) y_scale[tile * y_scale_stride + at] = decode;
                    const Kept kept{Divisor(decode)};
#pragma unroll
                    for (int j = 0; j < CHUNK; ++j) turn(y, j, kept, chunk, band, turned);
                    synchronize_team<TEAM>(team);
                    write_turned(turned, member, y_across + column * y_stride + at * SIDE, y_stride);
                }
            }

            // Largest magnitudes of columns, of the team, and of rows, of all teams. Whoever tells of
            // the band after the next has heard of the next one from all, who had read this one's by
            // then.
            Words dz;
            const unsigned told = base + TOLD_AT + (turns & 1) * TOLD_BYTES;
            const unsigned heard = heard_at + (turns & 1) * 8;
            wait(full, 1);
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                load_shared_16_bytes(mine + i * ROW_BYTES, dz.word[i]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    dz.word[i][j] &= signs_spread(positive[i / 4] << (i % 4 * 4 + j));
                }
            }
            unsigned of_column[4], of_row[HELD / 2];
            list(dz, of_column, of_row);
#pragma unroll
            for (int i = 0; i < HELD / 2; ++i) {
                unsigned two = of_row[i];
#pragma unroll
                for (int distance = CHUNKS / 2; distance > 0; distance /= 2) {
                    two = larger_halves(two, value_across(two, distance));
                }
                if (chunk < 2) {
                    store_shared_half(
                        told + ((band * HELD + 2 * i + chunk) * TEAMS_TOLD + team) * 2,
                        chunk ? two >> 16 : two);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // a warp has two bands
                of_column[j] = larger_halves(of_column[j], value_across(of_column[j], CHUNKS));
                if (threadIdx.x % 32 < CHUNKS) own.lists[warp][chunk * 4 + j] = of_column[j];
            }
            synchronize_team<TEAM>(team);
            if (at + clusters < bands) bring(y_map, at + clusters);
            if (member < CLUSTER) {
                arrive_in_cluster(CLUSTER > 1 ? address_in(heard, member) : heard);
            }
            if (member < SIDE) {
                unsigned largest = 0;
#pragma unroll
                for (int i = 0; i < WARPS; ++i) {
                    largest = larger_halves(largest, own.lists[i][member / 2]);
                }
                const float decode =
                    decode_scale(member % 2 == 0 ? largest << 16 : largest & 0xffff0000u);
                own.keep(COLUMNS, member % CHUNK * CHUNKS + member / CHUNK, Divisor(decode));
                across_scale[at * across_scale_stride + column + member] = decode;
            }
            synchronize_team<TEAM>(team);
            forget(dz);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                turn(dz, j, Kept(own, COLUMNS, j * CHUNKS + chunk), chunk, band, turned);
            }
            synchronize_team<TEAM>(team);
            write_turned(
                turned, member, across + column * across_stride + at * SIDE, across_stride);

            if (member < SIDE) {
                wait_for_cluster(heard, turns / 2 & 1);
                unsigned largest = 0;
                const unsigned place = told + member * TEAMS_TOLD * 2;
#pragma unroll
                for (int other = 0; other < CLUSTER; ++other) {
                    const uint2 four =
                        load_from_cluster_8(CLUSTER > 1 ? address_in(place, other) : place);
                    largest = larger_halves(largest, larger_halves(four.x, four.y));
                }
                const float decode = decode_scale(max(largest << 16, largest & 0xffff0000u));
                own.keep(ROWS, member, Divisor(decode));
                if (tile == 0) scale[at * SIDE + member] = decode;
            }
            synchronize_team<TEAM>(team);
            forget(dz);
            unsigned char* to = data + (at * SIDE + band * HELD) * data_stride + column + chunk * CHUNK;
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const Kept kept(own, ROWS, band * HELD + i);
                float quotient[CHUNK];
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    quotient[j] = kept.divide(element(dz.word[i], j));
                }
                unsigned bytes[2];
                encode(quotient, bytes);
                write<false>(bytes, to + i * data_stride, CHUNK);
            }
        }
    }
    synchronize_cluster();  // others read this block's memory
}
