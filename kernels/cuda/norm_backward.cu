// Gradients of a norm of rows and of what follows it, in one pass that also quantizes them to FP8
// both ways, as the next GEMMs of a backward pass read them.
//
//     h = (y - mean) rstd;   z = h weight + shift;   g = dd last'(z)
//     dweight = sum of rows of g h;   dshift = sum of rows of g
//     t = g weight;   dy = rstd (t - mean(t) - h mean(t h))
//
// with means over the span of a row whose statistics are shared; no mean(t) in rms; dy = t without a
// norm. dy is float32 until it is rounded: to bfloat16, to FP8, and in its column sums not at all.
//
//     dd, y, dy:    [rows, COLUMNS], bfloat16, rows start at multiples of 16 bytes
//     data, scale:  of dy: [rows, COLUMNS] FP8, and of row r and 128 columns c at
//                   scale[c * scale_stride + r]
//     across, across_scale: the same of the transpose of dy
//     parts:        float32 [tiles of 128 rows, sums asked for, COLUMNS], for quantize_sums.cu
//
// A team of 256 threads has a tile of 128 x 128, 8 rows of 8 columns each thread, in registers from
// the first look at it to the last, so that memory is read once. The blocks of a cluster have the tiles
// of a span, and tell each other of each row what theirs holds: mean and squared deviations, merged
// as Chan does, then the sums that make both means. Always in the order of columns, in every block
// alike: deterministic. Only where a row has more than 16 tiles (2048 columns) a team has several,
// STEPS, and reads them again for each look, from the L2 where they still are.
//
// Macros besides those of quantize.cuh, from norm_backward.py:
//
//     COLUMNS      of a row, a multiple of 8
//     TEAMS, STEPS teams of a block, and tiles of a team: a block has TEAMS STEPS neighbors
//     CLUSTER      blocks that share statistics
//     NORM         0: none; 1: layer; 2: rms
//     SPAN         columns that share statistics: COLUMNS, or a power of two from 8 to 256
//     VECTORS      bits: 2 weight, 4 shift
//     VECTOR_ITEM  bytes of their elements: 4 float32, 2 bfloat16
//     LAST         0: nothing; 1: relu; 2: hardswish; 3: silu
//     SUMS         bits, of columns of: 1 dy, 2 g h, 4 g
//     PLAIN        1 to write dy
//     QUANTIZES    1 to write data and across
#include "folds.cuh"
#include "norm.cuh"
#include "norm_backward_ptx.cuh"
#include "quantize.cuh"
#include "quantize_sums.cuh"

constexpr int SIDE = 128, HELD = 8;
constexpr int CHUNKS = SIDE / CHUNK;          // of a row of a tile: threads that share it
constexpr int TEAM = CHUNKS * (SIDE / HELD);  // threads
constexpr int THREADS = TEAMS * TEAM, SM_BLOCKS = 2 / TEAMS;
constexpr int WARPS = TEAM / 32;
constexpr int TILES = (COLUMNS + SIDE - 1) / SIDE;  // of a row
constexpr int BLOCK_TILES = TEAMS * STEPS;
constexpr int BLOCKS = (TILES + BLOCK_TILES - 1) / BLOCK_TILES;
constexpr bool RAGGED = COLUMNS % (BLOCK_TILES * SIDE) != 0;
constexpr bool NARROW = NORM != 0 && SPAN < SIDE && SPAN < COLUMNS;  // several spans in a tile
constexpr bool SHARES = NORM != 0 && !NARROW;
constexpr bool SHIFTS = (VECTORS & 4) && LAST != 0;  // else nothing depends on it
constexpr int TOTALS = (SUMS & 1) + (SUMS >> 1 & 1) + (SUMS >> 2 & 1);
// Of a column: its totals, and its largest magnitude, which nobody reads where nothing is quantized;
// without it the compiler puts off what is made of each element, and keeps all that it is made of.
constexpr int LISTS = TOTALS + 1;
constexpr int PITCH = SIDE + CHUNKS;       // of a list: a chunk takes 9 places, against conflicts
constexpr int LIST_BYTES = LISTS * WARPS * PITCH * 4;
constexpr int TURNED_BYTES = QUANTIZES ? SIDE * SIDE : 0;
constexpr int SLOT_BYTES = CLUSTER > 1 ? CLUSTER * SIDE * 8 : 0;
static_assert(CHUNK == 8 && COLUMNS % CHUNK == 0, "bfloat16 in whole chunks");
static_assert(TEAMS == 1 || STEPS == 1, "two teams are instead of two tiles");
static_assert(!NARROW || (NORM == 2 && SPAN % CHUNK == 0 && CLUSTER == 1 && BLOCK_TILES == 1),
              "neighbors have a narrow span");
static_assert(!SHARES || SPAN <= CLUSTER * BLOCK_TILES * SIDE, "a cluster has a span");
static_assert(SHARES || CLUSTER == 1, "a cluster shares statistics");
static_assert(BLOCKS % CLUSTER == 0, "clusters have whole rows, or whole spans of them");

__device__ constexpr int larger_of(int a, int b) { return a > b ? a : b; }
// What a team needs one after the other: the two rounds of what other blocks tell (the first
// team's), lists of columns, what goes across.
constexpr int SCRATCH = larger_of(larger_of(2 * SLOT_BYTES, LIST_BYTES), larger_of(TURNED_BYTES, 16));

struct alignas(16) Piece {
    unsigned word[4];
};

// Where a thread sits. Made anew wherever it is asked for, not kept in registers.
struct Seat {
    int team, member, chunk, band;  // a band is of 8 rows

    __device__ __forceinline__ Seat() {
        unsigned thread = threadIdx.x;
        forget(thread);
        team = thread / TEAM;
        member = thread % TEAM;
        chunk = member % CHUNKS;
        band = member / CHUNKS;
    }
};

// Over the neighbors that have a narrow span.
__device__ __forceinline__ float sum_of_neighbors(float value) {
#pragma unroll
    for (int distance = SPAN / CHUNK / 2; distance > 0; distance /= 2) {
        value += across_warp(value, distance);
    }
    return value;
}

// An element at one of four looks at a tile. Each takes it out of its word by an instruction of its
// own: else the compiler keeps what the look before took out, twice the registers, and spills.
template <int LOOK>
__device__ __forceinline__ float value(const unsigned (&word)[4], int index) {
    if constexpr (LOOK == 0) return __uint_as_float(element(word, index));
    const unsigned zero = hidden_zero<LOOK - 1>();
    return __uint_as_float(__byte_perm(word[index / 2], zero, index % 2 ? 0x3244 : 0x1044));
}

// Of a weight or a shift.
__device__ __forceinline__ float vector_element(const void* from, int column) {
    if constexpr (VECTOR_ITEM == 4) return static_cast<const float*>(from)[column];
    return from_bfloat16(static_cast<const unsigned short*>(from)[column]);
}

// dd last'(z). At NaN a slope is NaN, or 1: what was NaN before the norm makes rows NaN anyway.
__device__ __forceinline__ float through_last(float dd, float z) {
    if constexpr (LAST == 1) return z <= 0.0f ? 0.0f : dd;
    if constexpr (LAST == 2) {
        float slope = fmaf(z, 1.0f / 3.0f, 0.5f);
        slope = z >= 3.0f ? 1.0f : slope;
        return z <= -3.0f ? 0.0f : dd * slope;
    }
    if constexpr (LAST == 3) {
        const float s = sigmoid(z);
        return dd * (s * fmaf(z, 1.0f - s, 1.0f));
    }
    return dd;
}

// h and g of an element.
__device__ __forceinline__ Pair gradient(float dd, float y, const Four& row, const float* vector) {
    float h = y;
    if constexpr (NORM == 1) h -= row.value[0];
    if constexpr (NORM != 0) h *= row.value[1];
    float z = h;
    if constexpr (VECTORS & 2) z *= vector[0];
    if constexpr (SHIFTS) z += vector[1];
    return Pair{h, through_last(dd, z)};
}

// What comes after is not done on the way, where registers are short.
template <int ROWS>
__device__ __forceinline__ void keep_apart(float (&made)[ROWS][CHUNK]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
            unsigned bits = __float_as_uint(made[i][j]);
            forget(bits);
            made[i][j] = __uint_as_float(bits);
        }
    }
}

__device__ __forceinline__ float columns_from(int column, int most) {
    return static_cast<float>(max(0, min(COLUMNS - column, most)));
}

// Of columns and of as many `more`: mean and squared deviations of both, or sums.
template <bool MOMENTS>
__device__ __forceinline__ Pair merged(Pair a, float columns, Pair b, float more) {
    if constexpr (!MOMENTS) return Pair{a.first + b.first, a.second + b.second};
    if (more == 0.0f) return a;
    const float share = more / (columns + more), distance = b.first - a.first;
    return Pair{fmaf(distance, share, a.first),
                a.second + b.second + distance * distance * (columns * share)};
}

// Of a row, threadIdx.x % SIDE, over its span, from what each tile of this block has of it. `slots`
// are of this round: who writes into them has nobody to wait for.
template <bool MOMENTS>
__device__ __forceinline__ Pair of_span(const Pair (*own)[SIDE], Pair* slots, int first_column) {
    const int row = threadIdx.x % SIDE;
    __syncthreads();
    Pair all = own[0][row];
    float columns = columns_from(first_column, SIDE);
#pragma unroll
    for (int tile = 1; tile < BLOCK_TILES; ++tile) {
        const float more = columns_from(first_column + tile * SIDE, SIDE);
        all = merged<MOMENTS>(all, columns, own[tile][row], more);
        columns += more;
    }
    if constexpr (CLUSTER > 1) {
        Pair* mine = slots + blockIdx.x % CLUSTER * SIDE + row;
        for (int to = threadIdx.x / SIDE; to < CLUSTER; to += THREADS / SIDE) {
            store_in_cluster(mine, to, all);
        }
        meet_in_cluster();
        all = slots[row];
        constexpr int EACH = BLOCK_TILES * SIDE;
#pragma unroll
        for (int block = 1; block < CLUSTER; ++block) {
            const int more = SPAN - block * EACH < EACH ? SPAN - block * EACH : EACH;
            all = merged<MOMENTS>(all, block * EACH, slots[block * SIDE + row], more);
        }
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(THREADS, SM_BLOCKS) norm_backward(
    const char* dd, const char* y, const void* weight, const void* shift, char* dy,
    unsigned char* data, float* scale, unsigned char* across, float* across_scale, float* parts,
    int rows, float eps, long long dd_stride, long long y_stride, long long dy_stride,
    long long data_stride, long long across_stride, long long scale_stride,
    long long across_scale_stride) {
    __shared__ Piece scratch[TEAMS][(SCRATCH + 15) / 16];
    __shared__ Pair own[SHARES ? BLOCK_TILES : 1][SIDE];
    __shared__ Four of_row[SIDE];  // mean, rstd, means of t and of t h
    __shared__ Pair of_thread[NARROW ? HELD : 1][THREADS];  // rstd and mean of t h, its own of a row
    __shared__ Four of_columns[TEAMS][CHUNKS * 5];  // weight and shift, of two columns each
    __shared__ float column_inverse[TEAMS][SIDE];

    if constexpr (CLUSTER > 1) begin_in_cluster();
    begin_in_turn();
    const int tile_row = blockIdx.x / BLOCKS;
    const int first_column = blockIdx.x % BLOCKS * (BLOCK_TILES * SIDE);
    Pair* slots = reinterpret_cast<Pair*>(scratch[0]);

    unsigned dd_word[HELD][4], y_word[HELD][4];
    // A tile of this team, 0 where there is none of it.
    const auto fetch_rows = [&](const char* from, long long stride, int tile_column,
                                unsigned (&word)[HELD][4]) {
        const Seat seat;
        const int column = tile_column + seat.chunk * CHUNK;
        const int row = tile_row * SIDE + seat.band * HELD, rows_left = rows - row;
        from += (row * stride + column) * 2;
#pragma unroll
        for (int i = 0; i < HELD; ++i, from += stride * 2) {
            fetch(from, i < rows_left ? COLUMNS - column : 0, word[i]);
        }
    };
    // Weight and shift of its columns, there for all after the next meeting of threads. A chunk takes
    // 5 places, against conflicts.
    const auto fetch_vectors = [&](int tile_column) {
        if constexpr (!(VECTORS & 2) && !SHIFTS) return;
        const Seat seat;
        const int mine = seat.member, column = tile_column + mine;
        if (mine >= SIDE) return;
        float* to = of_columns[seat.team][mine / CHUNK * 5 + mine % CHUNK / 2].value + mine % 2 * 2;
        if constexpr (VECTORS & 2) to[0] = column < COLUMNS ? vector_element(weight, column) : 0.0f;
        if constexpr (SHIFTS) to[1] = column < COLUMNS ? vector_element(shift, column) : 0.0f;
    };
    const auto fetch_both = [&](int tile_column) {
        fetch_rows(y, y_stride, tile_column, y_word);
        fetch_rows(dd, dd_stride, tile_column, dd_word);
        fetch_vectors(tile_column);
    };
    const auto fetch_again = [&](int tile_column) {
        __syncthreads();  // the vectors of the tile before have been read
        fetch_both(tile_column);
        __syncthreads();
    };
    // Weight and shift of the two columns from j of the chunk on, or what leaves all as it is.
    const auto vectors_of = [&](const Seat& seat, int j) {
        if constexpr (!(VECTORS & 2) && !SHIFTS) return Four{{1.0f, 0.0f, 1.0f, 0.0f}};
        return load_now(&of_columns[seat.team][seat.chunk * 5 + j / 2]);
    };
    if constexpr (STEPS == 1) {
        fetch_both(first_column + Seat().team * SIDE);
        if constexpr (!SHARES) __syncthreads();
    }

    // Statistics of rows.
    float narrow_rstd[HELD] = {};
    if constexpr (SHARES) {
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            const Seat seat;
            const int tile = step * TEAMS + seat.team, tile_column = first_column + tile * SIDE;
            const bool inside = !RAGGED || tile_column + seat.chunk * CHUNK < COLUMNS;
            if constexpr (STEPS > 1) fetch_rows(y, y_stride, tile_column, y_word);
            float center[HELD] = {}, total[HELD];
            float mean = 0.0f;
            if constexpr (NORM == 1) {
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    float v[CHUNK];
#pragma unroll
                    for (int j = 0; j < CHUNK; ++j) v[j] = value<0>(y_word[i], j);
                    total[i] = sum_by_twos<CHUNK>(v);
                }
                mean = of_rows<Sum>(total) / fmaxf(columns_from(tile_column, SIDE), 1.0f);
                spread(mean, center);
            }
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                float left = 0.0f, right = 0.0f;
#pragma unroll
                for (int j = 0; j < CHUNK; j += 2) {
                    const float one = value<3>(y_word[i], j) - center[i];
                    const float other = value<3>(y_word[i], j + 1) - center[i];
                    left = fmaf(one, one, left);
                    right = fmaf(other, other, right);
                }
                total[i] = inside ? left + right : 0.0f;
            }
            const float squares = of_rows<Sum>(total);
            if (seat.chunk % 2 == 0) {
                own[tile][seat.band * HELD + seat.chunk / 2] = Pair{mean, squares};
            }
        }
        if constexpr (CLUSTER > 1) await_begun_cluster();
        const Pair all = of_span<NORM == 1>(own, slots, first_column);
        if (threadIdx.x < SIDE) {  // rows that are not there are 0, and stay so
            const bool there = tile_row * SIDE + threadIdx.x < rows;
            const float rstd = rsqrtf(fmaf(all.second, 1.0f / SPAN, eps));
            of_row[threadIdx.x] = Four{{all.first, there ? rstd : 0.0f, 0.0f, 0.0f}};
        }
        __syncthreads();
    }
    if constexpr (NARROW) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            float left = 0.0f, right = 0.0f;
#pragma unroll
            for (int j = 0; j < CHUNK; j += 2) {
                left = fmaf(value<0>(y_word[i], j), value<0>(y_word[i], j), left);
                right = fmaf(value<0>(y_word[i], j + 1), value<0>(y_word[i], j + 1), right);
            }
            const float rstd = rsqrtf(fmaf(sum_of_neighbors(left + right), 1.0f / SPAN, eps));
            narrow_rstd[i] = tile_row * SIDE + Seat().band * HELD + i < rows ? rstd : 0.0f;
        }
    }

    // Mean and rstd of a row, and means of t and of t h once they are made.
    const auto row_of = [&](const Seat& seat, int i) {
        if constexpr (SHARES) return load_now(&of_row[seat.band * HELD + i]);
        if constexpr (NARROW) return Four{{0.0f, narrow_rstd[i], 0.0f, 0.0f}};
        return Four{{0.0f, 1.0f, 0.0f, 0.0f}};
    };
    if constexpr (NORM != 0) {  // means of t and of t h
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            const Seat seat;
            const int tile = step * TEAMS + seat.team;
            if constexpr (STEPS > 1) fetch_again(first_column + tile * SIDE);
            Four vectors[CHUNK / 2];
#pragma unroll
            for (int j = 0; j < CHUNK; j += 2) vectors[j / 2] = vectors_of(seat, j);
            float both[2 * HELD];
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const Four row = row_of(seat, i);
                float first = 0.0f, second = 0.0f;
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    const float* vector = vectors[j / 2].value + j % 2 * 2;
                    const Pair at = gradient(value<1>(dd_word[i], j), value<1>(y_word[i], j), row,
                                             vector);
                    const float t = VECTORS & 2 ? at.second * vector[0] : at.second;
                    first += t;
                    second = fmaf(t, at.first, second);
                }
                both[i] = first;
                both[HELD + i] = second;
            }
            if constexpr (NARROW) {
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    const float mean = sum_of_neighbors(both[HELD + i]) * (1.0f / SPAN);
                    of_thread[i][threadIdx.x] = Pair{narrow_rstd[i], mean};
                }
            } else if constexpr (NORM == 1) {  // a thread has one of both, of one row
                fold<Sum, 16>(both, 8);
                fold<Sum, 8>(both, 4);
                fold<Sum, 4>(both, 2);
                fold<Sum, 2>(both, 1);
                Pair& to = own[tile][seat.band * HELD + seat.chunk % HELD];
                (seat.chunk < HELD ? to.first : to.second) = both[0];
            } else {
                float second[HELD];
#pragma unroll
                for (int i = 0; i < HELD; ++i) second[i] = both[HELD + i];
                const float sum = of_rows<Sum>(second);
                if (seat.chunk % 2 == 0) {
                    own[tile][seat.band * HELD + seat.chunk / 2] = Pair{0.0f, sum};
                }
            }
        }
        if constexpr (SHARES) {
            const Pair all = of_span<false>(own, slots + CLUSTER * SIDE, first_column);
            if (threadIdx.x < SIDE) {
                of_row[threadIdx.x].value[2] = all.first * (1.0f / SPAN);
                of_row[threadIdx.x].value[3] = all.second * (1.0f / SPAN);
            }
            __syncthreads();
        }
    }

    // dy, its sums and its bytes.
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        const Seat seat;
        const int team = seat.team, member = seat.member, chunk = seat.chunk, band = seat.band;
        const int row = tile_row * SIDE + band * HELD, rows_left = rows - row;
        const int tile_column = first_column + (step * TEAMS + team) * SIDE;
        const int column = tile_column + chunk * CHUNK;
        const bool inside = !RAGGED || column < COLUMNS;
        if constexpr (STEPS > 1) fetch_again(tile_column);
        float made[HELD][CHUNK];
        float* lists = reinterpret_cast<float*>(scratch[team]);
#pragma unroll
        for (int j = 0; j < CHUNK; j += 2) {
            Adder of_dy[2], of_weight[2], of_shift[2];
            float largest[2] = {0.0f, 0.0f};
            const Four vectors = vectors_of(seat, j);
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                Four row;
                if constexpr (NARROW) {
                    const Pair narrow = load_now(&of_thread[i][team * TEAM + member]);
                    row = Four{{0.0f, narrow.first, 0.0f, narrow.second}};
                } else {
                    row = row_of(seat, i);
                }
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const float* vector = vectors.value + k * 2;
                    const Pair at = gradient(value<2>(dd_word[i], j + k),
                                             value<2>(y_word[i], j + k), row, vector);
                    float v = VECTORS & 2 ? at.second * vector[0] : at.second;
                    if constexpr (NORM == 1) v -= row.value[2];
                    if constexpr (NORM != 0) v = fmaf(-at.first, row.value[3], v) * row.value[1];
                    if constexpr (QUANTIZES) {  // infinity is NaN in FP8, and no part of a scale
                        v = fabsf(v) == INFINITE ? NOT_A_NUMBER : v;
                    }
                    if (!inside) v = 0.0f;
                    largest[k] = fmaxf(largest[k], fabsf(v));
                    made[i][j + k] = v;
                    if constexpr (SUMS & 1) of_dy[k].add(i, v);
                    if constexpr (SUMS & 2) of_weight[k].add(i, at.second * at.first);
                    if constexpr (SUMS & 4) of_shift[k].add(i, at.second);
                }
            }
            // Of 8 rows, then of 16: this thread keeps one of both columns.
            const int place = member / 32 * PITCH + chunk * (CHUNK + 1) + j + (threadIdx.x / 16 % 2);
            int list = 0;
            const auto keep = [&](const Adder (&of)[2]) {
                float two[2] = {of[0].pending[3], of[1].pending[3]};
                fold<Sum, 2>(two, 16);
                lists[list++ * (WARPS * PITCH) + place] = two[0];
            };
            if constexpr (SUMS & 1) keep(of_dy);
            if constexpr (SUMS & 2) keep(of_weight);
            if constexpr (SUMS & 4) keep(of_shift);
            fold<Largest, 2>(largest, 16);
            lists[list * (WARPS * PITCH) + place] = largest[0];
        }

        keep_apart(made);
        if constexpr (PLAIN) {
            char* to = dy + (row * dy_stride + column) * 2;
#pragma unroll
            for (int i = 0; i < HELD; ++i, to += dy_stride * 2) {
                unsigned eight[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    eight[j] = bfloat16_pair(made[i][2 * j], made[i][2 * j + 1]);
                }
                store_16_bytes_if(inside && i < rows_left, to, eight);
            }
        }
        if constexpr (QUANTIZES) {
            keep_apart(made);
            float in_row[HELD], inverse[HELD];
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                in_row[i] = 0.0f;
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) in_row[i] = fmaxf(in_row[i], fabsf(made[i][j]));
            }
            const float decode = decode_scale(__float_as_uint(of_rows<Largest>(in_row)));
            if (chunk % 2 == 0 && chunk / 2 < rows_left && tile_column < COLUMNS) {
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
                store_8_bytes_if(inside && i < rows_left, to, bytes);
            }
        }

        // Columns: a thread has one, of half of the lists.
        if constexpr (TOTALS > 0 || QUANTIZES) {
            __syncthreads();
            const int mine = member % SIDE, to_column = tile_column + mine;
#pragma unroll
            for (int list = 0; list < TOTALS + QUANTIZES; ++list) {
                if (member / SIDE != list % 2) continue;
                float of_warp[WARPS];
#pragma unroll
                for (int i = 0; i < WARPS; ++i) {
                    of_warp[i] = lists[(list * WARPS + i) * PITCH + mine + mine / CHUNK];
                }
                if (list < TOTALS) {
                    const float sum = sum_by_twos<WARPS>(of_warp);
                    const long long line = static_cast<long long>(tile_row) * TOTALS + list;
                    if (to_column < COLUMNS) parts[line * COLUMNS + to_column] = sum;
                    continue;
                }
                float largest = of_warp[0];
#pragma unroll
                for (int i = 1; i < WARPS; ++i) largest = fmaxf(largest, of_warp[i]);
                const float decode = decode_scale(__float_as_uint(largest));
                column_inverse[team][mine] = __frcp_rn(decode);
                if (to_column < COLUMNS) {
                    across_scale[tile_row * across_scale_stride + to_column] = decode;
                }
            }
            if constexpr (QUANTIZES) __syncthreads();
        }

        // The transpose, as in quantize_tile.cu: 8 bytes of a column at a time through shared
        // memory, permuted so that no bank has two at once.
        if constexpr (QUANTIZES) {
            unsigned long long* shared = reinterpret_cast<unsigned long long*>(scratch[team]);
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                const float inverse = column_inverse[team][chunk * CHUNK + j];
                float quotient[HELD];
#pragma unroll
                for (int i = 0; i < HELD; ++i) quotient[i] = made[i][j] * inverse;
                unsigned bytes[2];
                encode(quotient, bytes);
                shared[(chunk * CHUNK + j) * (SIDE / HELD) + (band ^ chunk)] =
                    bytes[0] | static_cast<unsigned long long>(bytes[1]) << 32;
            }
            __syncthreads();
#pragma unroll
            for (int place = member; place < SIDE * SIDE / 16; place += TEAM) {
                const int from_column = place / 8, two = place % 8 * 2;  // bands
                const int permuted = from_column / CHUNK;
                const int to_row = tile_column + from_column;
                const int first = tile_row * SIDE + two * HELD, left = rows - first;
                if (to_row >= COLUMNS) continue;
                unsigned char* to = across + to_row * across_stride + first;
                if (left >= 16) {
                    Piece piece = scratch[team][from_column * 8 + (two ^ (permuted & ~1)) / 2];
                    if (permuted & 1) {
                        piece = Piece{{piece.word[2], piece.word[3], piece.word[0], piece.word[1]}};
                    }
                    *reinterpret_cast<Piece*>(to) = piece;
                    continue;
                }
                const unsigned char* byte = reinterpret_cast<unsigned char*>(scratch[team]);
#pragma unroll 1
                for (int i = 0; i < left; ++i) {
                    to[i] = byte[(from_column * 16 + (two + i / 8 ^ permuted)) * 8 + i % 8];
                }
            }
        }
    }
}
