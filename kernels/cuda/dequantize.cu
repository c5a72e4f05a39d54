// Dequantize from FP8: x = rn(q * s) in float32, then rounded to the output.
//
//     data:  [rows, columns], FP8 bytes, rows data_stride bytes apart
//     scale: float32; of row r at scale[r]; of group g of row r at scale[g * scale_stride + r]; of
//            block (i, j) at scale[i * scale_stride + j]
//     out:   [rows, columns], bfloat16, float16 or float32, rows out_stride elements apart
//
// A piece is what becomes 16 bytes of a row of the output, from 8 or 4 bytes of q. Neighboring threads
// have neighboring pieces, so that every store writes whole sectors of memory; with 16 bytes of q each
// it would write halves of them. Where rows of the output start anywhere, pieces lie where 16 bytes of
// memory do, and a row has up to one piece more. A thread has the same piece of ACCESSES rows one
// below the other, and reads all before it writes any.
//
// Macros, from dequantize.py:
//
//     IS_E5M2    1 for e5m2, 0 for e4m3fn
//     OUT_BYTES  of an element of the output: 4 for float32, else 2
//     IS_HALF    1 where these 2 are float16, 0 where they are bfloat16
//     SCALES     0 for one of a group of 128 columns, 1 of a block of 128 x 128, 2 of a row, 3 of all
//     IN_PLACE   1 where every row of the output starts at a multiple of 16 bytes, and every row of q
//                at one of the bytes of a piece; else 0
//     RAGGED     0 where rows consist of whole pieces, else 1
//     ACCESSES   pieces of a thread, a power of two up to 128
//     THREADS    of a block
#include "dequantize_ptx.cuh"
#include "ptx.cuh"

#if OUT_BYTES == 4
typedef unsigned Word;
#else
typedef unsigned long long Word;
#endif
constexpr int PIECE = sizeof(Word);  // elements, and bytes of q
constexpr int SIDE = 128;            // columns of a group, rows and columns of a block
constexpr int GROUPS = 0, BLOCKS = 1, ROWS = 2;
static_assert(PIECE * OUT_BYTES == 16 && (IN_PLACE || RAGGED) && SIDE % ACCESSES == 0);

__device__ __forceinline__ float scale_at(
    const float* scale, unsigned row, unsigned column, long long scale_stride) {
    if constexpr (SCALES == GROUPS) return (scale + column / SIDE * scale_stride)[row];
    if constexpr (SCALES == BLOCKS) return scale[row / SIDE * scale_stride + column / SIDE];
    if constexpr (SCALES == ROWS) return scale[row];
    return *scale;
}

// Scales of a piece. Where pieces begin at any column they may reach into the next group.
struct Scales {
    float first, second;
    int until;  // the element whose scale is the second

    __device__ __forceinline__ float of(int index) const {
        return !IN_PLACE && SCALES <= BLOCKS && index >= until ? second : first;
    }
};

__device__ __forceinline__ Scales scales_at(
    const float* scale, unsigned row, int column, int columns, long long scale_stride) {
    Scales found;
    const int first = IN_PLACE ? column : max(column, 0);
    found.first = scale_at(scale, row, first, scale_stride);
    if constexpr (!IN_PLACE && SCALES <= BLOCKS) {
        const int last = columns - column < PIECE ? columns - 1 : column + PIECE - 1;
        found.second = scale_at(scale, row, last, scale_stride);
        found.until = SIDE - first % SIDE;
    }
    return found;
}

// Bytes of q of a piece from a column on, which is negative where the piece begins before its row.
// Where they lie askew these are parts of two words, each read only if it holds some of the row.
__device__ __forceinline__ Word fetch(const unsigned char* row, int column, int columns) {
    Word low = 0;
    const unsigned char* from = row + column;
    if constexpr (IN_PLACE) {
        load_word(from, low);
        return low;
    }
    Word high = 0;
    const int askew = reinterpret_cast<unsigned long long>(from) & (PIECE - 1);
    if (column > askew - PIECE) load_cached_word(from - askew, low);
    if (askew && columns - column > PIECE - askew) load_cached_word(from - askew + PIECE, high);
    return askew ? low >> askew * 8 | high << (PIECE - askew) * 8 : low;
}

__device__ __forceinline__ void write(
    Word bytes, const Scales& scales, char* row, int column, int columns) {
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < PIECE; i += 2) {
        const unsigned pair = decode_pair<IS_E5M2>(static_cast<unsigned>(bytes >> i * 8) & 0xffffu);
        const float first = __fmul_rn(from_half(pair & 0xffffu), scales.of(i));
        const float second = __fmul_rn(from_half(pair >> 16), scales.of(i + 1));
        if constexpr (OUT_BYTES == 4) {
            word[i % 4] = __float_as_uint(first);
            word[i % 4 + 1] = __float_as_uint(second);
        } else {
            word[i / 2] = IS_HALF ? half_pair(first, second) : bfloat16_pair(first, second);
        }
    }
    char* to = row + static_cast<long long>(column) * OUT_BYTES;
    if (!RAGGED || ((IN_PLACE || column >= 0) && columns - column >= PIECE)) {
        store_16_bytes(to, word);
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        if (column + i < 0 || i >= columns - column) continue;
        if constexpr (OUT_BYTES == 4) {
            reinterpret_cast<unsigned*>(to)[i] = word[i % 4];
        } else {
            reinterpret_cast<unsigned short*>(to)[i] = word[i / 2] >> i % 2 * 16;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(
    const unsigned char* data, const float* scale, char* out, int rows, int columns, int across,
    long long data_stride, long long out_stride, long long scale_stride) {
    // A row has `across` pieces. Divided while the kernel before may still run.
    const unsigned piece = blockIdx.x * THREADS + threadIdx.x, pieces = across;
    const unsigned row = piece / pieces * ACCESSES;
    const int place = piece % pieces * PIECE;
    const int left = rows - static_cast<int>(min(row, static_cast<unsigned>(rows)));
    const unsigned char* from = data + row * data_stride;
    char* to = out + row * out_stride * OUT_BYTES;
    begin_in_turn();

    Word bytes[ACCESSES];
    Scales scales[ACCESSES];
    int column[ACCESSES];
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        column[i] = place;
        if constexpr (!IN_PLACE) {
            const char* start = to + i * out_stride * OUT_BYTES;
            column[i] -= (reinterpret_cast<unsigned long long>(start) & 15) / OUT_BYTES;
            if (i >= left) column[i] = columns;  // none
        }
        if (IN_PLACE ? i < left : column[i] < columns) {
            bytes[i] = fetch(from + i * data_stride, column[i], columns);
            const unsigned scaled = SCALES == BLOCKS ? row : row + i;  // its rows are in one block
            scales[i] = scales_at(scale, scaled, column[i], columns, scale_stride);
        }
    }
#pragma unroll
    for (int i = 0; i < ACCESSES; ++i) {
        if (IN_PLACE ? i < left : column[i] < columns) {
            write(bytes[i], scales[i], to + i * out_stride * OUT_BYTES, column[i], columns);
        }
    }
}
