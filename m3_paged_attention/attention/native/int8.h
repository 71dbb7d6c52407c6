// Linear layers with weights of eight bits: half the bytes of bfloat16, a quarter of float32.
//
// A weight is a whole number from -127 to 127 times a scale, which 128 inputs of an output feature share. Panels are as
// in linear.h. Each has its scales between its weights, so memory is still read in one direction:
//
//     [out_features / 64] x [in_features / 128] x ([64] floats, [128][64] whole numbers)      the last may have fewer
//
// The whole numbers become floats or bfloat16 in registers, exactly. With several groups of rows, the first one keeps
// them for the others in the cache. The sum of 128 inputs is multiplied by its scale and added to the result: in the
// same order for any number of rows.

#pragma once

#include "linear.h"

namespace {

constexpr long SCALE_GROUP = 128;       // inputs that share a scale
constexpr long AHEAD = SCALE_GROUP * PANEL;  // distance of the prefetch, in bytes

// `weights_at` of linear.h for a panel of whole numbers
template <class T> inline Weights<T> converted_at(const int8_t* panel, long k, long v) {
    const int8_t* from = panel + k * PANEL + v * LANES;
    if constexpr (PAIR<T> == 1)
        return load(from);
    else  // the upper halves of two inputs' floats, whose lower halves are zeros
        return (Words)load(from) >> 16 | (Words)load(from + PANEL);
}

// Modes of `multiply_scaled`: convert its panel, also keep the result, or read what was kept.
enum Use { CONVERT, CONVERT_AND_KEEP, READ_KEPT };

// --8<-- [start:multiply_scaled]
// sums [ROWS][PANEL] += x [ROWS][depth] * panel [depth][PANEL] * scales [PANEL]; `kept`: the panel as T
template <class T, int ROWS, Use USE>
__attribute__((noinline)) void multiply_scaled(const T* x, const int8_t* panel, const float* scales, T* kept,
                                               float* sums, long in, long depth) {
    Floats s[ROWS][VECTORS] = {};
    for (long k = 0; k < depth; k += PAIR<T>) {
        for (int v = 0; v < VECTORS; v++) {
            Weights<T> weights;
            if constexpr (USE == READ_KEPT)
                weights = weights_at(kept, k, v);
            else {
                if (v < PAIR<T>) fetch(panel + AHEAD + (k + v) * PANEL, 1);
                weights = converted_at<T>(panel, k, v);
            }
            if (USE == CONVERT_AND_KEEP) std::memcpy((void*)(kept + k * PANEL + v * LANES * PAIR<T>), &weights, 64);
            for (int r = 0; r < ROWS; r++) s[r][v] = add_product(s[r][v], weights, x + r * in + k);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            float* sum = sums + r * PANEL + v * LANES;
            store(sum, load(sum) + s[r][v] * load(scales + v * LANES));
        }
}
// --8<-- [end:multiply_scaled]

template <Use USE, class T>
inline void multiply_scaled(long rows, const T* x, const int8_t* panel, const float* scales, T* kept, float* sums,
                            long in, long depth) {
    switch (rows) {
        case 1: return multiply_scaled<T, 1, USE>(x, panel, scales, kept, sums, in, depth);
        case 2: return multiply_scaled<T, 2, USE>(x, panel, scales, kept, sums, in, depth);
        case 3: return multiply_scaled<T, 3, USE>(x, panel, scales, kept, sums, in, depth);
        case 4: return multiply_scaled<T, 4, USE>(x, panel, scales, kept, sums, in, depth);
        case 5: return multiply_scaled<T, 5, USE>(x, panel, scales, kept, sums, in, depth);
        default: return multiply_scaled<T, GROUP, USE>(x, panel, scales, kept, sums, in, depth);
    }
}

inline long num_scales(long in) { return (in + SCALE_GROUP - 1) / SCALE_GROUP; }
inline long panel_bytes(long in) { return (num_scales(in) * (long)sizeof(float) + in) * PANEL; }

// y [rows][out] = x [rows][in] * weights + bias
template <class T>
void linear_int8(const T* x, const int8_t* packed, const T* bias, T* y, long rows, long in, long out, int threads) {
    for_panels(bias, y, rows, out, threads, [=](long first, long count, long p, float* sums) {
        const int8_t* panel = packed + p * panel_bytes(in);
        alignas(64) T kept[SCALE_GROUP * PANEL];
        const long num_groups = (count + GROUP - 1) / GROUP;
        for (long from = 0; from < in; from += SCALE_GROUP) {
            const long depth = std::min(SCALE_GROUP, in - from);
            const float* scales = (const float*)panel;
            fetch(panel + AHEAD, PANEL * sizeof(float));
            panel += PANEL * sizeof(float);
            for (long g = 0; g < num_groups; g++) {
                const long r = g * count / num_groups, size = (g + 1) * count / num_groups - r;
                const T* inputs = x + (first + r) * in + from;
                float* to = sums + r * PANEL;
                if (num_groups == 1)
                    multiply_scaled<CONVERT>(size, inputs, panel, scales, kept, to, in, depth);
                else if (g == 0)
                    multiply_scaled<CONVERT_AND_KEEP>(size, inputs, panel, scales, kept, to, in, depth);
                else
                    multiply_scaled<READ_KEPT>(size, inputs, panel, scales, kept, to, in, depth);
            }
            panel += depth * PANEL;
        }
    });
}

// `values` [out][in] and `scales` [out][in / 128] to panels
inline void pack(const int8_t* values, const float* scales, int8_t* packed, long in, long out, int threads) {
    const long num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < num_panels; p++) {
        int8_t* to = packed + p * panel_bytes(in);
        for (long from = 0; from < in; from += SCALE_GROUP) {
            for (long i = p * PANEL; i < (p + 1) * PANEL; i++, to += sizeof(float)) {
                const float scale = i < out ? scales[i * num_scales(in) + from / SCALE_GROUP] : 0.0f;
                std::memcpy(to, &scale, sizeof(scale));
            }
            for (long k = from; k < std::min(in, from + SCALE_GROUP); k++)
                for (long i = p * PANEL; i < (p + 1) * PANEL; i++) *to++ = i < out ? values[i * in + k] : 0;
        }
    }
}

}  // namespace
