// Linear layers with weights of eight bits: half the bytes of bfloat16, a quarter of float32.
//
// A weight is an integer from -127 to 127 times a scale, which 128 inputs of an output feature share. Panels are as
// in linear.h, with pairs of inputs side by side. Each has its scales between its weights, so memory is still read in
// one direction:
//
//     [out_features / 64] x [in_features / 128] x ([64] floats, [64][64][2] integers)    the last may have fewer
//
// The inputs become integers, too, of sixteen bits with a scale for each 128 of a row: their error is 1 / 65534 of
// the largest, and one instruction adds 32 products. The sum of 128 products is exact in 32 bits. Times both scales it
// is added to the result: in the same order for any number of rows.

#pragma once

#include <memory>

#include "kv.h"
#include "linear.h"

namespace {

constexpr long SCALE_GROUP = 128;            // inputs that share a scale
constexpr long AHEAD = SCALE_GROUP * PANEL;  // distance of the prefetch, in bytes
constexpr long ROUNDED_ALONE = 1 << 14;      // inputs that one thread rounds faster than two

inline long num_scales(long in) { return (in + SCALE_GROUP - 1) / SCALE_GROUP; }
inline long panel_bytes(long in) { return (num_scales(in) * (long)sizeof(float) + in) * PANEL; }

// Inputs as integers: [rows][num_scales][128], the last filled up with zeros, and [rows][num_scales] scales.
struct Inputs {
    long per_row;  // scales
    std::unique_ptr<int16_t[]> numbers;
    std::unique_ptr<float[]> scales;

    template <class T>
    Inputs(const T* x, long rows, long in, int threads)
        : per_row(num_scales(in)),
          numbers(new int16_t[rows * per_row * SCALE_GROUP]),
          scales(new float[rows * per_row]) {
        if (rows * in <= ROUNDED_ALONE) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads)
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < per_row; i++) {
                T group[SCALE_GROUP] = {};
                std::memcpy((void*)group, x + r * in + i * SCALE_GROUP,
                            std::min(SCALE_GROUP, in - i * SCALE_GROUP) * sizeof(T));
                const long at = r * per_row + i;
                scales[at] = quantize(group, SCALE_GROUP, &numbers[at * SCALE_GROUP]);
            }
    }
};

// sum + the products of a pair of weights of 16 features with a pair of inputs
inline Ints add_pair(Ints sum, const int8_t* weights, const int16_t* x) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    const __m512i inputs = _mm512_set1_epi32(read<int32_t>(x));
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, _mm512_cvtepi8_epi16(read<__m256i>(weights)), inputs);
#else
    const Ints pair = __builtin_convertvector(read<Shorts>(weights), Ints);  // the second weight in the upper byte
    return sum + (pair << 24 >> 24) * x[0] + (pair >> 8) * x[1];
#endif
}

// --8<-- [start:multiply_scaled]
// sums [ROWS][PANEL] += x [ROWS][depth] * panel [depth][PANEL] * both scales; a row of x has `per_row` scales
template <int ROWS, bool FETCHES>
__attribute__((noinline)) void multiply_scaled(const int16_t* x, const float* x_scales, long per_row,
                                               const int8_t* panel, const float* scales, float* sums, long depth) {
    Ints s[ROWS][VECTORS] = {};
    for (long k = 0; k < depth; k += 2, panel += 2 * PANEL) {
        // for one or two rows, processors without tiles fetch far enough ahead by themselves
        if (FETCHES && (ROWS > 2 || HAS_AMX)) fetch(panel + AHEAD, 2 * PANEL);
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < ROWS; r++)
                s[r][v] = add_pair(s[r][v], panel + v * 2 * LANES, x + r * per_row * SCALE_GROUP + k);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            float* sum = sums + r * PANEL + v * LANES;
            const Floats products = __builtin_convertvector(s[r][v], Floats);
            store(sum, load(sum) + products * (load(scales + v * LANES) * x_scales[r * per_row]));
        }
}
// --8<-- [end:multiply_scaled]

template <bool FETCHES, class... Args> inline void multiply_scaled(long rows, Args... args) {
    switch (rows) {
        case 1: return multiply_scaled<1, FETCHES>(args...);
        case 2: return multiply_scaled<2, FETCHES>(args...);
        case 3: return multiply_scaled<3, FETCHES>(args...);
        case 4: return multiply_scaled<4, FETCHES>(args...);
        case 5: return multiply_scaled<5, FETCHES>(args...);
        default: return multiply_scaled<GROUP, FETCHES>(args...);
    }
}

// sums [count][PANEL] = start + inputs [first..first + count][in] * panel
inline void multiply_panel(const Inputs& inputs, const int8_t* panel, const float* start, float* sums, long first,
                           long count, long in) {
    begin(start, sums, count);
    const int16_t* numbers = inputs.numbers.get();
    const float* x_scales = inputs.scales.get();
    const long per_row = inputs.per_row, num_groups = (count + GROUP - 1) / GROUP;
    for (long i = 0; i < per_row; i++) {
        const long depth = std::min(SCALE_GROUP, in - i * SCALE_GROUP);
        const float* scales = (const float*)panel;
        fetch(panel + AHEAD, PANEL * sizeof(float));
        panel += PANEL * sizeof(float);
        for (long g = 0; g < num_groups; g++) {
            const long r = g * count / num_groups, size = (g + 1) * count / num_groups - r;
            const long at = (first + r) * per_row + i;
            float* to = sums + r * PANEL;
            if (g == 0)
                multiply_scaled<true>(size, numbers + at * SCALE_GROUP, x_scales + at, per_row, panel, scales, to, depth);
            else
                multiply_scaled<false>(size, numbers + at * SCALE_GROUP, x_scales + at, per_row, panel, scales, to,
                                       depth);
        }
        panel += depth * PANEL;
    }
}

// y [rows][out] = x [rows][in] * weights + bias
template <class T>
void linear_int8(const T* x, const int8_t* packed, const T* bias, T* y, long rows, long in, long out, int threads) {
    const Inputs inputs(x, rows, in, threads);
    const auto product = [&](long first, long count, long p, const float* start, float* sums) {
        multiply_panel(inputs, packed + p * panel_bytes(in), start, sums, first, count, in);
    };
    for_panels(bias, y, rows, out, threads, ROW_BLOCK, product);
}

// panel p of `values` [out][in] and `scales` [out][in / 128]
inline void pack_panel(const int8_t* values, const float* scales, int8_t* to, long p, long in, long out) {
    for (long from = 0; from < in; from += SCALE_GROUP) {
        for (long i = p * PANEL; i < (p + 1) * PANEL; i++, to += sizeof(float)) {
            const float scale = i < out ? scales[i * num_scales(in) + from / SCALE_GROUP] : 0.0f;
            std::memcpy(to, &scale, sizeof(scale));
        }
        for (long k = from; k < std::min(in, from + SCALE_GROUP); k += 2)
            for (long i = p * PANEL; i < (p + 1) * PANEL; i++)
                for (long j = 0; j < 2; j++) *to++ = i < out ? values[i * in + k + j] : 0;
    }
}

// all panels of a weight
inline void pack(const int8_t* values, const float* scales, int8_t* packed, long in, long out, int threads) {
    const long num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < num_panels; p++) pack_panel(values, scales, packed + p * panel_bytes(in), p, in, out);
}

}  // namespace
