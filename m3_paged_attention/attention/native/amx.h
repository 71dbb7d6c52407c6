// Products of bfloat16 in tiles (AMX): a unit of the processor that multiplies 16 rows with 16 features at once.
//
// A tile has 16 rows of 64 bytes. One instruction adds the products of 16 rows of 32 inputs with 32 inputs of 16
// features, eight times as many as a vector instruction. A panel of linear.h is in the order that tiles need: pairs of
// inputs side by side. A tile adds up its own 32 inputs before it adds them to a sum, in another order than vectors do;
// so on a processor with tiles every product of bfloat16 uses them, also that of one row: then a row has the same bits
// alone and among others.

#pragma once

#include <initializer_list>

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

namespace {

#if HAS_AMX

constexpr long TILE_ROWS = 16, TILE_DEPTH = 32;  // rows of a tile, and inputs that a tile has of each row
constexpr long TILE_BLOCK = 256;  // inputs at a time: 16 KiB of 32 rows, and as much of half a panel
constexpr long FETCHED_AHEAD = 64;  // inputs between a product of few rows and what is prefetched for it

// The kernel of the system saves tiles only for processes that have asked for it.
inline bool ask_for_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
const bool has_tiles = ask_for_tiles();

// Rows of the eight tiles.
struct alignas(64) TileSizes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    TileSizes(std::initializer_list<long> of_tiles) {
        int i = 0;
        for (const long size : of_tiles) {
            if (size) row_bytes[i] = 64, rows[i] = (uint8_t)size;
            i++;
        }
    }
};
// The intrinsics of GCC do not say what they read: without this, it may leave out stores of sizes, or move those of
// numbers behind the loads of tiles.
inline void configure(const TileSizes& sizes) {
    asm volatile("" : : "r"(&sizes) : "memory");
    _tile_loadconfig(&sizes);
}

constexpr long STRIDE = 64 * sizeof(float);  // from row to row of sums, and of pairs of weights, in bytes

// What sums begin with: the same row for all of them, or the sums so far.
struct Start {
    const float* row;
    long stride;
    Start(const float* start, const float* sums) : row(start ? start : sums), stride(start ? 0 : STRIDE) {}
    const float* operator[](long r) const { return row + r * stride / (long)sizeof(float); }
};

// sums [rows][64] = start + x [rows][from..to] * panel, for at most 16 rows: it reads the panel in order.
inline void multiply_few(long rows, const bfloat16* x, const bfloat16* panel, const float* start, float* sums, long in,
                         long from, long to) {
    const TileSizes sizes{rows, rows, rows, rows, rows, TILE_ROWS, TILE_ROWS, TILE_ROWS};
    const Start begin(start, sums);
    configure(sizes);
    _tile_loadd(0, begin[0], begin.stride);
    _tile_loadd(1, begin[0] + 16, begin.stride);
    _tile_loadd(2, begin[0] + 32, begin.stride);
    _tile_loadd(3, begin[0] + 48, begin.stride);
    for (long k = from; k < to; k += TILE_DEPTH) {
        const bfloat16* weights = panel + k * 64;
        fetch<true>(weights + FETCHED_AHEAD * 64, TILE_DEPTH * 64);
        _tile_loadd(4, x + k, in * sizeof(bfloat16));
        _tile_loadd(5, weights, STRIDE);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, weights + 32, STRIDE);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, weights + 64, STRIDE);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, weights + 96, STRIDE);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + 16, STRIDE);
    _tile_stored(2, sums + 32, STRIDE);
    _tile_stored(3, sums + 48, STRIDE);
}

// sums [rows][32 of 64] = start + x [rows][from..to] * half a panel, for 16 rows and up to 16 more, as they were
// configured. With each tile, `fetched` weights from `ahead` on are prefetched.
inline void multiply_many(const bfloat16* x, const bfloat16* panel, const float* start, float* sums, long in, long from,
                          long to, const bfloat16* ahead, long fetched) {
    const Start begin(start, sums);
    _tile_loadd(0, begin[0], begin.stride);
    _tile_loadd(1, begin[0] + 16, begin.stride);
    _tile_loadd(2, begin[TILE_ROWS], begin.stride);
    _tile_loadd(3, begin[TILE_ROWS] + 16, begin.stride);
    for (long k = from; k < to; k += TILE_DEPTH, ahead += fetched) {
        fetch(ahead, fetched);
        _tile_loadd(6, panel + k * 64, STRIDE);
        _tile_loadd(4, x + k, in * sizeof(bfloat16));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + k * 64 + 32, STRIDE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + TILE_ROWS * in + k, in * sizeof(bfloat16));
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + 16, STRIDE);
    _tile_stored(2, sums + TILE_ROWS * 64, STRIDE);
    _tile_stored(3, sums + TILE_ROWS * 64 + 16, STRIDE);
}

// sums [count][64] = start + x [count][in] * panel, but for inputs behind the last whole tile; returns their number.
// `start`: a row, or null for the sums so far. `in`: at least a tile's.
inline long multiply_in_tiles(const bfloat16* x, const bfloat16* panel, const float* start, float* sums, long count,
                              long in) {
    constexpr long PAIR_OF_TILES = 2 * TILE_ROWS;
    const long whole = in / TILE_DEPTH * TILE_DEPTH, rest = count % PAIR_OF_TILES, most = count - rest;
    if (count <= TILE_ROWS) {
        multiply_few(count, x, panel, start, sums, in, 0, whole);
    } else
        for (long from = 0; from < whole; from += TILE_BLOCK) {
            const long to = std::min(whole, from + TILE_BLOCK);
            const bfloat16* ahead = panel + to * 64;  // the next block, also of the next panel
            const long fetched = TILE_DEPTH * 32 / ((count + TILE_ROWS - 1) / PAIR_OF_TILES);
            for (long half = 0; half < 64; half += 32) {
                const float* begin = start ? start + half : nullptr;
                const auto add = [&](long r) {
                    multiply_many(x + r * in, panel + half * 2, begin, sums + r * 64 + half, in, from, to, ahead, fetched);
                    ahead += (to - from) / TILE_DEPTH * fetched;
                };
                if (most) {
                    const TileSizes sizes{16, 16, 16, 16, 16, 16, 16, 16};
                    configure(sizes);
                    for (long r = 0; r < most; r += PAIR_OF_TILES) add(r);
                }
                if (rest > TILE_ROWS) {
                    const long more = rest - TILE_ROWS;
                    const TileSizes sizes{16, 16, more, more, 16, more, 16, 16};
                    configure(sizes);
                    add(most);
                }
            }
            if (0 < rest && rest <= TILE_ROWS)
                multiply_few(rest, x + most * in, panel, start, sums + most * 64, in, from, to);
            start = nullptr;
        }
    _tile_release();
    return in - whole;
}
#endif

}  // namespace
