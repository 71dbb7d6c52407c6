// The experts of a layer: each token is multiplied with the weights of the few that its router has chosen.
//
// Pairs of a token and an expert are ordered by expert, so that the weights of an expert are read once for as many
// rows as share a panel, and those of an expert without a token never. Experts are stored one after the other, in
// panels of linear.h or int8.h. Panels of gate and up take turns:
//
//     [experts][width / 64] x (panel of gate, panel of up)        [experts][hidden / 64] x panel of down

#pragma once

#include <vector>

#include "int8.h"
#include "linear.h"
#include "pointwise.h"

namespace {

// A product for a layer's experts: [experts][parts][features][in] to panels
template <class T>
void pack_experts(const T* weight, T* packed, long in, long features, long parts, long experts, int threads) {
    const long num_panels = (features + PANEL - 1) / PANEL;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads)
    for (long e = 0; e < experts; e++)
        for (long p = 0; p < num_panels; p++)
            for (long part = 0; part < parts; part++)
                pack_panel(weight + (e * parts + part) * features * in, packed + ((e * num_panels + p) * parts + part) * PANEL * in,
                           p, in, features);
}

inline void pack_experts(const int8_t* values, const float* scales, int8_t* packed, long in, long features, long parts,
                         long experts, int threads) {
    const long num_panels = (features + PANEL - 1) / PANEL;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads)
    for (long e = 0; e < experts; e++)
        for (long p = 0; p < num_panels; p++)
            for (long part = 0; part < parts; part++) {
                const long row = (e * parts + part) * features;
                pack_panel(values + row * in, scales + row * num_scales(in),
                           packed + ((e * num_panels + p) * parts + part) * panel_bytes(in), p, in, features);
            }
}

// Pairs of a token and one of its experts, by expert.
struct Pairs {
    struct Block {  // of one expert
        long expert, first, count;
    };
    std::vector<long> tokens, places;  // tokens of the ordered pairs; where in this order a pair [tokens][top_k] is
    std::vector<Block> blocks;

    // `most`: rows of a block
    Pairs(const int64_t* experts, long num_tokens, long top_k, long num_experts, long most)
        : tokens(num_tokens * top_k), places(num_tokens * top_k) {
        std::vector<long> starts(num_experts + 1);
        for (long i = 0; i < size(); i++) starts[experts[i] + 1]++;
        for (long e = 0; e < num_experts; e++) {
            const long count = starts[e + 1], num_blocks = (count + most - 1) / most;
            for (long b = 0; b < num_blocks; b++) {
                const long first = b * count / num_blocks;
                blocks.push_back({e, starts[e] + first, (b + 1) * count / num_blocks - first});
            }
            starts[e + 1] += starts[e];
        }
        for (long i = 0; i < size(); i++) {
            places[i] = starts[experts[i]]++;
            tokens[places[i]] = i / top_k;
        }
    }
    long size() const { return (long)tokens.size(); }
};

// Rows of inputs, in the format that panels of a kind are multiplied with.
template <class T> struct DenseRows {
    const T* x;
    long in;
    DenseRows(const T* x, long, long in, int) : x(x), in(in) {}
    static long most() { return row_block<T>(); }
    const void* panel(const void* packed, long p) const { return (const T*)packed + p * PANEL * in; }
    void multiply(const void* panel, float* sums, long first, long count) const {
        multiply_panel(x + first * in, (const T*)panel, ZEROS, sums, count, in);
    }
};
template <class T> struct Int8Rows {
    Inputs inputs;
    long in;
    Int8Rows(const T* x, long rows, long in, int threads) : inputs(x, rows, in, threads), in(in) {}
    static long most() { return ROW_BLOCK; }
    const void* panel(const void* packed, long p) const { return (const int8_t*)packed + p * panel_bytes(in); }
    void multiply(const void* panel, float* sums, long first, long count) const {
        multiply_panel(inputs, (const int8_t*)panel, ZEROS, sums, first, count, in);
    }
};

// y [pairs][features]: call `compute(block, panel, features of it, where in y)` for each block and panel
template <class T, class Compute>
void for_blocks(const Pairs& pairs, T* y, long features, int threads, Compute compute) {
    const long num_blocks = (long)pairs.blocks.size(), num_panels = (features + PANEL - 1) / PANEL;
    const long at_once = (num_panels + threads - 1) / threads;  // side by side, because one fetches the next one ahead
#pragma omp parallel for collapse(2) schedule(dynamic, at_once) num_threads(threads)
    for (long b = 0; b < num_blocks; b++)
        for (long p = 0; p < num_panels; p++) {
            const Pairs::Block& block = pairs.blocks[b];
            T* to = y + block.first * features + p * PANEL;
            compute(block, block.expert * num_panels + p, std::min(PANEL, features - p * PANEL), to);
        }
}

// --8<-- [start:experts]
// y [tokens][hidden] = sum over the experts of a token of weight * down(silu(gate) * up). `work`: [pairs] times
// [hidden], [width] and [hidden]. All widths are multiples of 16.
template <class T, class Rows>
void run_experts(const T* x, const int64_t* experts, const T* weights, const void* gate_up, const void* down, T* y, T* work,
                 long num_tokens, long top_k, long num_experts, long hidden, long width, int threads) {
    const Pairs pairs(experts, num_tokens, top_k, num_experts, Rows::most());
    const long num_pairs = pairs.size();
    T *of_pairs = work, *gated = of_pairs + num_pairs * hidden, *outputs = gated + num_pairs * width;
#pragma omp parallel for if (num_pairs * hidden > SERIAL_SIZE) num_threads(threads)
    for (long i = 0; i < num_pairs; i++)
        std::memcpy((void*)(of_pairs + i * hidden), x + pairs.tokens[i] * hidden, hidden * sizeof(T));
    const Rows inputs(of_pairs, num_pairs, hidden, threads);
    for_blocks(pairs, gated, width, threads, [&](const Pairs::Block& block, long p, long features, T* to) {
        alignas(64) float gate[MOST_ROWS * PANEL], up[MOST_ROWS * PANEL];
        inputs.multiply(inputs.panel(gate_up, 2 * p), gate, block.first, block.count);
        inputs.multiply(inputs.panel(gate_up, 2 * p + 1), up, block.first, block.count);
        for (long r = 0; r < block.count; r++)
            for (long i = 0; i < features; i += LANES) {
                const Floats g = load(gate + r * PANEL + i);
                store(to + r * width + i, g / (1.0f + exp(-g)) * load(up + r * PANEL + i));
            }
    });
    const Rows inner(gated, num_pairs, width, threads);
    for_blocks(pairs, outputs, hidden, threads, [&](const Pairs::Block& block, long p, long features, T* to) {
        alignas(64) float sums[MOST_ROWS * PANEL];
        inner.multiply(inner.panel(down, p), sums, block.first, block.count);
        for (long r = 0; r < block.count; r++)
            for (long i = 0; i < features; i += LANES) store(to + r * hidden + i, load(sums + r * PANEL + i));
    });
#pragma omp parallel for if (num_pairs * hidden > SERIAL_SIZE) num_threads(threads)
    for (long t = 0; t < num_tokens; t++)
        for (long i = 0; i < hidden; i += LANES) {
            Floats total = {};  // always in the order of the token's experts
            for (long k = t * top_k; k < (t + 1) * top_k; k++)
                total += load(outputs + pairs.places[k] * hidden + i) * load_one(weights + k);
            store(y + t * hidden + i, total);
        }
}
// --8<-- [end:experts]

}  // namespace
