// Attention of many queries over the same keys and values.
//
// Prompts have many queries, so the products are those of linear layers. Keys and values are copied into panels of 64
// tokens, and a tile of queries is multiplied with them: scores with the keys, their softmax with the values.

#pragma once

#include <memory>
#include <vector>

#include "kv.h"
#include "linear.h"

namespace {

template <class T> struct AlignedBuffer {  // uninitialised memory for some elements, aligned to a cache line
    std::unique_ptr<char[]> memory;
    T* begin;
    explicit AlignedBuffer(long size) : memory(new char[size * sizeof(T) + 64]) {
        begin = (T*)(((uintptr_t)memory.get() + 63) / 64 * 64);
    }
};

// Keys as a panel whose features are tokens: [dim / PAIR][64 tokens][PAIR]. In units of four bytes, 16 x 16 at once.
template <class T> void pack_keys(const T* keys, const long* at, long dim, T* panel) {
    uint32_t* to = (uint32_t*)panel;
    for (long first = 0; first < PANEL; first += LANES)
        for (long i = 0; i < dim / PAIR<T>; i += LANES) {
            Words words[LANES];
            for (long t = 0; t < LANES; t++) words[t] = read<Words>(keys + at[first + t] + i * PAIR<T>);
            transpose(words);
            for (long t = 0; t < LANES; t++) std::memcpy(to + (i + t) * PANEL + first, &words[t], sizeof(Words));
        }
}

// The values of one token, or of a pair of tokens; the second one of a pair may be missing.
inline void interleave(const float* one, const float*, long width, float* to) {
    for (long i = 0; i < width; i += LANES) store(to + i, load(one + i));
}
inline void interleave(const bfloat16* one, const bfloat16* two, long width, bfloat16* to) {
    uint32_t* pairs = (uint32_t*)to;
    if (two)
        for (long i = 0; i < width; i++) pairs[i] = one[i].bits | (uint32_t)two[i].bits << 16;
    else
        for (long i = 0; i < width; i++) pairs[i] = one[i].bits;
}

// Values as panels of 64 features: [dim / 64][64 tokens / PAIR][64][PAIR].
template <class T> void pack_values(const T* values, const long* at, long count, long dim, T* panels) {
    for (long first = 0; first < dim; first += PANEL) {
        const long width = std::min(PANEL, dim - first);
        T* panel = panels + first * PANEL;
        if (width < PANEL || count < PANEL) std::memset((void*)panel, 0, PANEL * PANEL * sizeof(T));
        for (long t = 0; t < count; t += PAIR<T>)
            interleave(values + at[t] + first, t + 1 < count ? values + at[t + 1] + first : nullptr, width,
                       panel + t * PANEL);
    }
}

struct Rows {  // state of 16 queries during the pass over their sequence
    Floats largest = all(-INFINITY), total = {};  // largest: before the scale of the products

    // Convert the scores of 64 tokens to weights, for each of `rows` queries; a query attends to its first `visible`
    // tokens. Returns the factor of the earlier sums. The scales of the tokens: [64] each, or null.
    template <bool IS_SCALED, class T>
    Floats weigh(long rows, float* scores, const long* visible, float scale, T* weights, const float* key_scales,
                 const float* value_scales) {
        const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Floats most[LANES] = {}, sum_of_weights[LANES] = {};
        for (long r = 0; r < rows; r++) {
            const bool is_cut = visible[r] < PANEL;
            most[r] = all(-INFINITY);
            for (long v = 0; v < VECTORS; v++) {
                float* at = scores + r * PANEL + v * LANES;
                Floats score = load(at);
                if constexpr (IS_SCALED) score *= load(key_scales + v * LANES);
                if (is_cut) score = pick(lane + (int)(v * LANES) < (int)visible[r], score, all(-INFINITY));
                if (IS_SCALED || is_cut) store(at, score);
                most[r] = larger(score, most[r]);
            }
        }
        const Floats before = largest;
        largest = larger(largests(most), before);
        const Floats base = pick(largest == -INFINITY, Floats{}, largest);  // without a token, the weights are zeros
        for (long r = 0; r < rows; r++)
            for (long v = 0; v < VECTORS; v++) {
                Floats weight = exp((load(scores + r * PANEL + v * LANES) - base[r]) * scale);
                sum_of_weights[r] += weight;
                if constexpr (IS_SCALED) weight *= load(value_scales + v * LANES);
                store(weights + r * PANEL + v * LANES, weight);
            }
        const Floats shrink = pick(before == largest, all(1.0f), exp((before - base) * scale));
        total = total * shrink + sums(sum_of_weights);
        return shrink;
    }
};

// Queries of one KV head that read the same keys and values, and the state of their pass.
template <class T, class K> struct Tile {
    const long rows, dim, num_panels;
    AlignedBuffer<T> queries, weights, key_panel, value_panels, unpacked;
    AlignedBuffer<float> scales, scores, outputs;  // scales: of keys, and of values; outputs: sums of values, [panels][rows][64]
    std::vector<Rows> states;

    Tile(long rows, long dim)
        : rows(rows), dim(dim), num_panels((dim + PANEL - 1) / PANEL), queries(rows * dim), weights(rows * PANEL),
          key_panel(PANEL * dim), value_panels(num_panels * PANEL * PANEL),
          unpacked(IS_OWN<T, K> ? 0 : 2 * PANEL * dim), scales(2 * PANEL), scores(rows * PANEL),
          outputs(num_panels * rows * PANEL), states((rows + LANES - 1) / LANES) {
        std::fill_n(outputs.begin, num_panels * rows * PANEL, 0.0f);
    }

    void set_query(long row, const T* from) { std::memcpy((void*)(queries.begin + row * dim), from, dim * sizeof(T)); }

    // Sum of values of a row, 16 elements from i on.
    Floats sum(long row, long i) const { return load(outputs.begin + (i / PANEL * rows + row) * PANEL + i % PANEL); }
    float total(long row) const { return states[row / LANES].total[row % LANES]; }
    float largest(long row) const { return states[row / LANES].largest[row % LANES]; }

    // Attend to the first `length` tokens of a table; each `group` rows to one token more than those before, the last
    // ones to all. With group = 0, all rows to all tokens.
    void attend(const K* keys, const K* values, const int32_t* table, long length, long group, const Shape& shape,
                long kv_head, float scale) {
        for (long token = 0; token < length; token += PANEL) {
            pack(keys, values, table, token, length, shape, kv_head);
            multiply_panel(queries.begin, key_panel.begin, ZEROS, scores.begin, rows, dim);
            for (long from = 0; from < rows; from += LANES) {
                const long some = std::min((long)LANES, rows - from);
                long visible[LANES];
                for (long r = 0; r < some; r++)
                    visible[r] = length - token - (group ? (rows - 1 - from - r) / group : 0);
                weigh(from, some, visible, scale);
            }
            for (long p = 0; p < num_panels; p++) {
                float* sums = outputs.begin + p * rows * PANEL;
                multiply_panel(weights.begin, value_panels.begin + p * PANEL * PANEL, nullptr, sums, rows, PANEL);
            }
        }
    }

    // Copy the keys and values of up to 64 tokens into panels.
    void pack(const K* keys, const K* values, const int32_t* table, long token, long length, const Shape& shape,
              long kv_head) {
        const long num_tokens = std::min(PANEL, length - token);
        TokenOffsets<K, PANEL> places(table, token, length, shape, true);  // no query attends to what is after the end
        long* at = places.at;
        for (long t = 0; t < PANEL; t++) at[t] += kv_head * dim;
        if constexpr (SCALED<K>) {
            places.read_scales(keys, kv_head, shape, scales.begin);
            places.read_scales(values, kv_head, shape, scales.begin + PANEL);
        }
        if constexpr (IS_OWN<T, K>) {
            pack_keys(keys, at, dim, key_panel.begin);
            pack_values(values, at, num_tokens, dim, value_panels.begin);
        } else {
            T *key = unpacked.begin, *value = key + PANEL * dim;
            for (long t = 0; t < PANEL; t++) {
                convert(keys + at[t], dim, key + t * dim);
                convert(values + at[t], dim, value + t * dim);
                at[t] = t * dim;
            }
            pack_keys(key, at, dim, key_panel.begin);
            pack_values(value, at, num_tokens, dim, value_panels.begin);
        }
    }

    // Convert the scores of up to 16 rows to weights, and scale their sums down.
    void weigh(long from, long some, const long* visible, float scale) {
        const long at = from * PANEL;
        const Floats shrink = states[from / LANES].template weigh<SCALED<K>>(
            some, scores.begin + at, visible, scale, weights.begin + at, scales.begin, scales.begin + PANEL);
        for (long r = 0; r < some; r++)
            for (long p = 0; shrink[r] != 1.0f && p < num_panels; p++)
                for (long v = 0; v < VECTORS; v++) {
                    float* sums = outputs.begin + (p * rows + from + r) * PANEL + v * LANES;
                    store(sums, load(sums) * shrink[r]);
                }
    }
};

// `count` queries from `first` on, of one sequence and one KV head. The last query attends to the whole sequence.
template <class T, class K>
void attend_to_tile(const T* query, const K* keys, const K* values, const int32_t* table, long context, long first,
                    long count, T* output, const Shape& shape, long kv_head, float scale) {
    const long dim = shape.head_dim, group = shape.heads / shape.kv_heads, rows = count * group;
    Tile<T, K> tile(rows, dim);
    for (long r = 0; r < rows; r++)
        tile.set_query(r, query + (first + r / group) * shape.query_stride + (kv_head * group + r % group) * dim);
    tile.attend(keys, values, table, context + first + count, group, shape, kv_head, scale);
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < dim; i += LANES)
            store(output + ((first + r / group) * shape.heads + kv_head * group + r % group) * dim + i,
                  tile.sum(r, i) / tile.total(r));
}

// Sequences with several new tokens: those of sequence s are starts[s]..starts[s + 1], the last of its lengths[s]. As many
// queries of a KV head share a copy of keys and values as rows of a linear layer share a panel.
template <class T, class K>
void attend_to_prompts(const T* query, const K* keys, const K* values, const int32_t* tables, const int32_t* starts,
                       const int32_t* lengths, T* output, const Shape& shape, float scale, int threads) {
    const long group = shape.heads / shape.kv_heads, tile = std::max(1L, row_block<T>() / group);
    for (long seq = 0; seq < shape.num_seqs; seq++) {
        const long start = starts[seq], num_new = starts[seq + 1] - start, num_tiles = (num_new + tile - 1) / tile;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
        for (long t = num_tiles - 1; t >= 0; t--)  // the longest first
            for (long kv_head = 0; kv_head < shape.kv_heads; kv_head++)
                attend_to_tile(query + start * shape.query_stride, keys, values, tables + seq * shape.table_stride,
                               lengths[seq] - num_new, t * tile, std::min(tile, num_new - t * tile),
                               output + start * shape.heads * shape.head_dim, shape, kv_head, scale);
    }
}

}  // namespace
