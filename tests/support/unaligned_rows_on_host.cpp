// kernels/cuda/unaligned_rows.cuh on a CPU, with memory that notices every store.
#include "cuda_on_host.hpp"

#include <vector>

static std::vector<unsigned char> shared;
static std::vector<unsigned char> written;  // how often each byte of global memory was
static char* global_memory;
static int faults;

static void load_shared_piece(unsigned address, unsigned* word) {
    if (address % 16 || address + 16 > shared.size()) return void(++faults);
    std::memcpy(word, &shared[address], 16);
}

template <int ITEM>
static unsigned load_shared_element(unsigned address) {
    unsigned value = 0;
    if (address % ITEM || address + ITEM > shared.size()) ++faults;
    else std::memcpy(&value, &shared[address], ITEM);
    return value;
}

static void store(char* to, const void* value, unsigned bytes) {
    const std::size_t at = to - global_memory;
    if (at % bytes || at + bytes > written.size()) return void(++faults);
    std::memcpy(to, value, bytes);
    for (unsigned i = 0; i < bytes; ++i) ++written[at + i];
}

static void store_piece(char* to, const unsigned (&word)[4], bool there) {
    if (there) store(to, word, 16);
}

template <int ITEM>
static void store_element(char* to, unsigned value, bool there) {
    if (there) store(to, &value, ITEM);
}

#include "unaligned_rows.cuh"

template <int PIECES>
struct Staged {
    unsigned at(int row, int piece) const { return (row * PIECES + piece) * PIECE; }
};

// Copies rows of numbered bytes. Returns how many accesses were out of bounds or unaligned, plus bytes
// that were written never, twice, wrongly or outside of the rows.
template <int ITEM, int ROWS, int PIECES>
static int copied(int offset, int pitch, int rows, int bytes) {
    alignas(16) static char memory[1 << 16];
    global_memory = memory;
    const int size = (offset + ROWS * pitch + PIECES * 16 + 31) / 16 * 16;
    std::memset(memory, 0xa5, size);
    written.assign(size, 0);
    faults = 0;
    shared.resize(ROWS * PIECES * 16);
    for (std::size_t i = 0; i < shared.size(); ++i) shared[i] = i * 37 % 251;
    for (int lane = 0; lane < 32; ++lane) {
        copy_rows<ITEM, ROWS, PIECES>(Staged<PIECES>{}, memory + offset, pitch, rows, bytes, lane);
    }
    std::vector<int> source(size, -1);  // of every byte
    for (int row = 0; row < rows; ++row) {
        for (int byte = 0; byte < bytes; ++byte) {
            source[offset + row * pitch + byte] = row * PIECES * 16 + byte;
        }
    }
    int wrong = faults;
    for (int i = 0; i < size; ++i) {
        const unsigned char expected = source[i] < 0 ? 0xa5 : shared[source[i]];
        wrong += written[i] != (source[i] >= 0) || static_cast<unsigned char>(memory[i]) != expected;
    }
    return wrong;
}

// Of rows that begin `offset` bytes from a multiple of 16, at every length they may have.
extern "C" int wrong_copies(int item, int rows_of_warp, int pieces, int offset, int pitch, int rows) {
    int wrong = 0;
    for (int bytes = item; bytes <= pieces * 16 && (rows_of_warp == 1 || bytes <= pitch); bytes += item) {
#define CASE(ITEM, ROWS, PIECES)                                               \
    if (item == ITEM && rows_of_warp == ROWS && pieces == PIECES) {            \
        wrong += copied<ITEM, ROWS, PIECES>(offset, pitch, rows, bytes) != 0;  \
        continue;                                                              \
    }
        CASE(2, 16, 16) CASE(2, 16, 8) CASE(2, 16, 3) CASE(2, 16, 2) CASE(2, 16, 1) CASE(2, 16, 32)
        CASE(2, 1, 26) CASE(2, 1, 2) CASE(2, 1, 62)
        CASE(4, 16, 16) CASE(4, 16, 6) CASE(4, 16, 2) CASE(4, 1, 52) CASE(4, 1, 4)
        return -1;
    }
    return wrong;
}
