// Operations between the matrix products: norms, rotary embedding, SiLU.

#pragma once

#include "vectors.h"

namespace {

constexpr long SERIAL_SIZE = 1 << 14;  // elements; starting the threads costs as much as a few thousand elements

template <class T> void norm_row(const T* from, const T* weight, T* to, long width, float eps) {
    Floats squares = {};
    for (long i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
    const float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (long i = 0; i < width; i += LANES) store(to + i, load(from + i) * scale * load(weight + i));
}

// Rows of `heads` heads of `width`; `weight` has a row for every head, or one for all.
template <class T>
void rms_norm(const T* x, const T* weight, T* y, long rows, long heads, long width, long stride, bool weight_per_head,
              float eps, int threads) {
#pragma omp parallel for if (rows * heads * width > SERIAL_SIZE) num_threads(threads)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const T* own = weight + (weight_per_head ? h * width : 0);
            norm_row(x + r * stride + h * width, own, y + (r * heads + h) * width, width, eps);
        }
}

template <class T> void add(const T* x, T* residual, long size) {
    for (long i = 0; i < size; i += LANES) store(residual + i, load(residual + i) + load(x + i));
}

template <class T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* y, long rows, long width, float eps, int threads) {
#pragma omp parallel for if (rows * width > SERIAL_SIZE) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        add(x + r * width, residual + r * width, width);
        norm_row(residual + r * width, weight, y + r * width, width, eps);
    }
}

// Rotate pairs (i, i + half) of every head by the angle of their token, in place.
template <class T>
void rotary(T* x, const float* cos, const float* sin, long tokens, long heads, long half, long stride, int threads) {
#pragma omp parallel for if (tokens * heads * half > SERIAL_SIZE) num_threads(threads)
    for (long t = 0; t < tokens; t++)
        for (long h = 0; h < heads; h++) {
            T *first = x + t * stride + h * 2 * half, *second = first + half;
            for (long i = 0; i < half; i += LANES) {
                const Floats a = load(first + i), b = load(second + i);
                const Floats c = load(cos + t * half + i), s = load(sin + t * half + i);
                store(first + i, a * c - b * s);
                store(second + i, b * c + a * s);
            }
        }
}

template <class T> void silu_mul(const T* gate_up, T* y, long rows, long width, int threads) {
#pragma omp parallel for if (rows * width > SERIAL_SIZE) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += LANES) {
            const Floats g = load(gate + i);
            store(y + r * width + i, g / (1.0f + exp(-g)) * load(up + i));
        }
    }
}

}  // namespace
