// Linear layers for few rows, with the weights in the order in which they are read.
//
// A decode step mostly waits for weights from memory: each weight is used once per row, and there are few rows. So the
// weights are stored in the order in which they are read, in panels of 64 output features:
//
//     [out_features / 64][in_features / PAIR][64][PAIR]      PAIR: 1 float or 2 bfloat16, four bytes
//
// A group of up to six rows keeps its 6 x 64 sums in registers while a panel is read. Missing features are zeros.

#pragma once

#include <type_traits>

#include "amx.h"
#include "vectors.h"

namespace {

constexpr long PANEL = 64, VECTORS = PANEL / LANES;
constexpr long GROUP = 6;          // maximum rows whose sums fit into 32 registers, with a part of a panel
constexpr long ROW_BLOCK = 96;     // maximum rows that share a panel while it is in the cache
constexpr long DEPTH_BLOCK = 512;  // input features of a panel at a time: 64 or 128 KiB, less than a core's own cache

template <class T> constexpr long PAIR = 4 / sizeof(T);

// Maximum rows that share a panel: more with tiles, which are soon done with it and wait for the next one.
constexpr long MOST_ROWS = 256;
alignas(64) constexpr float ZEROS[PANEL] = {};
template <class T> inline long row_block() {
#if HAS_AMX
    if (std::is_same_v<T, bfloat16> && has_tiles) return MOST_ROWS;
#endif
    return ROW_BLOCK;
}

// Weights of 16 features and PAIR inputs, in their place of a panel.
template <class T> using Weights = std::conditional_t<PAIR<T> == 1, Floats, Words>;

template <class T> inline Weights<T> weights_at(const T* panel, long k, long v) {
    return read<Weights<T>>(panel + k * PANEL + v * LANES * PAIR<T>);
}

inline Floats add_product(Floats sum, Floats weights, const float* x) { return sum + weights * all(*x); }
inline Floats add_product(Floats sum, Words weights, const bfloat16* x) {
    uint32_t pair = read<uint32_t>(x);
#if defined(__AVX512BF16__)
    const __m512bh pairs = (__m512bh)_mm512_set1_epi32((int)pair);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, pairs);
#else
    sum += (Floats)(weights << 16) * all(bits_of<float>(pair << 16));
    return sum + (Floats)(weights & 0xffff0000u) * all(bits_of<float>(pair & 0xffff0000u));
#endif
}

// sums [ROWS][PANEL] += x [ROWS][from..to] * panel [from..to][PANEL]. If FETCHES, half as many bytes from `ahead` on are
// prefetched.
template <class T, int ROWS, bool FETCHES>
__attribute__((noinline))  // inlined, its sums would share registers with the caller's variables
void multiply(const T* x, const T* panel, float* sums, long in, long from, long to, const T* ahead) {
    Floats s[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) s[r][v] = load(sums + r * PANEL + v * LANES);
    for (long k = from; k < to; k += PAIR<T>) {
        for (int v = 0; v < VECTORS; v++) {
            if (FETCHES && v < VECTORS / 2) fetch(ahead + (k - from) * PANEL / 2 + v * LANES * PAIR<T>, 1);
            const Weights<T> weights = weights_at(panel, k, v);
            for (int r = 0; r < ROWS; r++) s[r][v] = add_product(s[r][v], weights, x + r * in + k);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + v * LANES, s[r][v]);
}

template <bool FETCHES = false, class T>
inline void multiply(long rows, const T* x, const T* panel, float* sums, long in, long from, long to, const T* ahead) {
    switch (rows) {
        case 1: return multiply<T, 1, FETCHES>(x, panel, sums, in, from, to, ahead);
        case 2: return multiply<T, 2, FETCHES>(x, panel, sums, in, from, to, ahead);
        case 3: return multiply<T, 3, FETCHES>(x, panel, sums, in, from, to, ahead);
        case 4: return multiply<T, 4, FETCHES>(x, panel, sums, in, from, to, ahead);
        case 5: return multiply<T, 5, FETCHES>(x, panel, sums, in, from, to, ahead);
        default: return multiply<T, GROUP, FETCHES>(x, panel, sums, in, from, to, ahead);
    }
}

// y [rows][out] = bias + products. `multiply(first, count, p, start, sums)` writes both to `sums` [count][PANEL], with
// the bias as `start`, for each panel p and each block of `count` rows from the row `first` on, at most `most`.
template <class T, class Multiply>
void for_panels(const T* bias, T* y, long rows, long out, int threads, long most, Multiply multiply) {
    const long num_panels = (out + PANEL - 1) / PANEL, num_blocks = (rows + most - 1) / most;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (long block = 0; block < num_blocks; block++)
        for (long p = 0; p < num_panels; p++) {
            const long first = block * rows / num_blocks;  // of equal size, or one thread would wait for the other
            const long count = (block + 1) * rows / num_blocks - first;
            const long feature = p * PANEL, width = std::min(PANEL, out - feature);
            alignas(64) float sums[MOST_ROWS * PANEL], start[PANEL] = {};
            if (bias)
                for (long i = 0; i < width; i++) start[i] = load_one(bias + feature + i);
            multiply(first, count, p, start, sums);
            for (long r = 0; r < count; r++) {
                T* to = y + (first + r) * out + feature;
                if (width == PANEL)
                    for (long v = 0; v < VECTORS; v++) store(to + v * LANES, load(sums + r * PANEL + v * LANES));
                else
                    for (long i = 0; i < width; i++) store_one(to + i, sums[r * PANEL + i]);
            }
        }
}

// Set each row of sums to `start` [PANEL]; null leaves the sums as they are.
inline void begin(const float* start, float* sums, long count) {
    for (long r = 0; start && r < count; r++) std::memcpy(sums + r * PANEL, start, PANEL * sizeof(float));
}

// sums [count][PANEL] = start + x [count][in] * panel [in][PANEL]
template <class T> void multiply_panel(const T* x, const T* panel, const float* start, float* sums, long count, long in) {
#if HAS_AMX
    if constexpr (std::is_same_v<T, bfloat16>)
        if (has_tiles && in >= TILE_DEPTH) {
            const long rest = multiply_in_tiles(x, panel, start, sums, count, in);
            for (long r = 0; rest && r < count; r += GROUP)
                multiply(std::min(GROUP, count - r), x + r * in, panel, sums + r * PANEL, in, in - rest, in, panel);
            return;
        }
#endif
    begin(start, sums, count);
    const long num_groups = (count + GROUP - 1) / GROUP;
    for (long from = 0; from < in; from += DEPTH_BLOCK) {
        const long to = std::min(in, from + DEPTH_BLOCK);
        const T* next = panel + to * PANEL;  // also from one panel to the next
        for (long g = 0; g < num_groups; g++) {  // of equal size: 8 rows are 4 and 4
            const long r = g * count / num_groups, size = (g + 1) * count / num_groups - r;
            // A single group reads memory in order, which the processor fetches ahead by itself. Of several, each
            // of the last two fetches half of the next block. Of two groups that is also the first one, which may
            // still wait for this block; the second one alone would not be done with the next block in time.
            const long half = g - (num_groups - 2);
            if (num_groups > 1 && half >= 0) {
                const T* ahead = next + half * (to - from) * PANEL / 2;
                multiply<true>(size, x + r * in, panel, sums + r * PANEL, in, from, to, ahead);
            } else
                multiply(size, x + r * in, panel, sums + r * PANEL, in, from, to, next);
        }
    }
}

// y [rows][out] = x [rows][in] * weights + bias
template <class T>
void linear(const T* x, const T* packed, const T* bias, T* y, long rows, long in, long out, int threads) {
    const auto product = [=](long first, long count, long p, const float* start, float* sums) {
        multiply_panel(x + first * in, packed + p * PANEL * in, start, sums, count, in);
    };
    for_panels(bias, y, rows, out, threads, row_block<T>(), product);
}

// panel p of a weight [out][in]
template <class T> void pack_panel(const T* weight, T* to, long p, long in, long out) {
    for (long k = 0; k < in; k += PAIR<T>)
        for (long i = p * PANEL; i < (p + 1) * PANEL; i++)
            for (long j = 0; j < PAIR<T>; j++) *to++ = i < out ? weight[i * in + k + j] : T{};
}

template <class T> void pack(const T* weight, T* packed, long in, long out, int threads) {
    const long num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < num_panels; p++) pack_panel(weight, packed + p * in * PANEL, p, in, out);
}

}  // namespace
