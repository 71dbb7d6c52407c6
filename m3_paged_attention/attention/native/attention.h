// Attention over KV in blocks, which are read in place.
//
// One pass over the keys and values of a sequence, 16 tokens at a time. The largest score is not known before the end,
// so the sums are relative to the largest score so far, and are scaled down when a larger one comes:
//
//     largest' = max(largest, scores)      scale = e^(largest - largest')
//     total'   = total * scale + sum e^(scores - largest')
//     output'  = output * scale + sum e^(scores - largest') * values
//
// and the result is output / total: the softmax, without a second pass.

#pragma once

#include <vector>

#include "linear.h"

namespace {

constexpr long CHUNK = LANES;  // tokens
constexpr long MAX_HEADS = 4;  // query heads of one KV head that share a key while it is in a register

struct Shape {  // queries of [num_seqs] sequences over [blocks, block_size, kv_heads, head_dim] keys and values
    long num_seqs, heads, kv_heads, head_dim, block_size;
    long query_stride;  // elements from the query of one token to that of the next
    long table_stride;  // the same for block tables

    // Offset of the keys and values of a token, in elements.
    long offset_of(const int32_t* table, long token) const {
        return (table[token / block_size] * block_size + token % block_size) * kv_heads * head_dim;
    }
};

struct Chunk {  // some tokens of a sequence, and the offsets of the keys and values of their first head
    long count, at[CHUNK];

    Chunk(const int32_t* table, long token, long length, const Shape& shape) {
        count = std::max(0L, std::min(CHUNK, length - token));
        for (long t = 0; t < count; t++) at[t] = shape.offset_of(table, token + t);
    }
};

template <class T> struct Head {  // state of one query head during the pass over its sequence
    const T* query;
    float* output;  // [head_dim]
    float largest = -INFINITY, total = 0.0f;
};

// The largest score, or 0 where all scores so far are minus infinity: then their weights are zeros, not NaN.
inline float finite(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// sum + a * b, 32 elements, in 16 lanes
inline Floats add_products(Floats sum, const float* a, const float* b) {
    sum += load(a) * load(b);
    return sum + load(a + LANES) * load(b + LANES);
}
inline Floats add_products(Floats sum, const bfloat16* a, const bfloat16* b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)read<__m512i>(a), (__m512bh)read<__m512i>(b));
#else
    sum += load(a) * load(b);
    return sum + load(a + LANES) * load(b + LANES);
#endif
}

// --8<-- [start:attend_chunk]
// Attention of HEADS query heads of one KV head over a chunk of its keys and values; the next chunk is prefetched.
template <class T, int HEADS>
void attend_chunk(Head<T>* heads, const T* keys, const T* values, const Chunk& chunk, const Chunk& next, long dim,
                  float scale) {
    Floats products[HEADS][CHUNK] = {};
    for (long t = 0; t < chunk.count; t++) {
        const T* key = keys + chunk.at[t];
        if (t < next.count) fetch(keys + next.at[t], dim);
        Floats product[HEADS] = {};
        for (long i = 0; i < dim; i += 2 * LANES)
            for (int h = 0; h < HEADS; h++) product[h] = add_products(product[h], heads[h].query + i, key + i);
        for (int h = 0; h < HEADS; h++) products[h][t] = product[h];
    }
    alignas(64) float weights[HEADS][CHUNK];
    float shrink[HEADS];
    for (int h = 0; h < HEADS; h++) {
        float* scores = weights[h];
        store(scores, sums(products[h]) * scale);
        float largest = heads[h].largest;
        for (long t = 0; t < chunk.count; t++) largest = std::max(largest, scores[t]);
        for (long t = chunk.count; t < CHUNK; t++) scores[t] = -INFINITY;
        const Floats weight = exp(load(scores) - finite(largest));
        shrink[h] = exp(all(heads[h].largest - finite(largest)))[0];
        heads[h].largest = largest;
        heads[h].total = heads[h].total * shrink[h] + sum(weight);
        store(weights[h], weight);
    }
    for (long t = 0; t < next.count; t++) fetch(values + next.at[t], dim);
    for (long i = 0; i < dim; i += LANES) {
        Floats output[HEADS];
        for (int h = 0; h < HEADS; h++) output[h] = load(heads[h].output + i) * shrink[h];
        for (long t = 0; t < chunk.count; t++) {
            const Floats value = load(values + chunk.at[t] + i);
            for (int h = 0; h < HEADS; h++) output[h] += value * weights[h][t];
        }
        for (int h = 0; h < HEADS; h++) store(heads[h].output + i, output[h]);
    }
}
// --8<-- [end:attend_chunk]

template <class T>
void attend_chunk(long num_heads, Head<T>* heads, const T* keys, const T* values, const Chunk& chunk, const Chunk& next,
                  long dim, float scale) {
    switch (num_heads) {
        case 1: return attend_chunk<T, 1>(heads, keys, values, chunk, next, dim, scale);
        case 2: return attend_chunk<T, 2>(heads, keys, values, chunk, next, dim, scale);
        case 3: return attend_chunk<T, 3>(heads, keys, values, chunk, next, dim, scale);
        default: return attend_chunk<T, MAX_HEADS>(heads, keys, values, chunk, next, dim, scale);
    }
}

template <class T>
void attend(const T* query, const T* keys, const T* values, const int32_t* tables, const int32_t* lengths, T* output,
            const Shape& shape, float scale, int threads) {
    const long dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    // A thread computes all heads of a token, which are adjacent in memory. Threads share only few sequences.
    const long parts = shape.num_seqs >= 2 * threads ? 1 : std::min(shape.kv_heads, (long)threads);
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
    for (long seq = 0; seq < shape.num_seqs; seq++)
        for (long part = 0; part < parts; part++) {
            const long first = part * shape.kv_heads / parts, end = (part + 1) * shape.kv_heads / parts;
            const int32_t* table = tables + seq * shape.table_stride;
            const long length = lengths[seq], num_heads = (end - first) * group;
            const T* from = query + seq * shape.query_stride + first * group * dim;
            T* to = output + (seq * shape.heads + first * group) * dim;
            std::vector<float> sums(num_heads * dim, 0.0f);
            std::vector<Head<T>> heads(num_heads);
            for (long h = 0; h < num_heads; h++) heads[h].query = from + h * dim, heads[h].output = &sums[h * dim];
            Chunk next(table, 0, length, shape);
            for (long token = 0; token < length; token += CHUNK) {
                const Chunk chunk = next;
                next = Chunk(table, token + CHUNK, length, shape);
                for (long h = 0; h < num_heads; h += std::min(MAX_HEADS, group - h % group)) {
                    const long at = (first + h / group) * dim;
                    attend_chunk(group - h % group, &heads[h], keys + at, values + at, chunk, next, dim, scale);
                }
            }
            for (long h = 0; h < num_heads; h++)
                for (long i = 0; i < dim; i += LANES)
                    store(to + h * dim + i, load(heads[h].output + i) / (length ? heads[h].total : 1.0f));
        }
}

// Prompts have many queries, so the products are those of linear layers. Keys and values are copied into panels of 64
// tokens, and a tile of queries is multiplied with them: scores with the keys, their softmax with the values.

constexpr long TILE_ROWS = 96;  // maximum queries of one KV head that use a copy of keys and values

template <class T> struct Room {  // memory for some elements, aligned to a cache line
    std::vector<char> memory;
    T* begin;
    explicit Room(long size) : memory(size * sizeof(T) + 64) {
        begin = (T*)(((uintptr_t)memory.data() + 63) / 64 * 64);
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

template <class T> void multiply_all(const T* x, const T* panel, float* sums, long rows, long in) {
    for (long r = 0; r < rows; r += GROUP)
        multiply(std::min(GROUP, rows - r), x + r * in, panel, sums + r * PANEL, in, 0, in, panel);
}

struct Rows {  // state of 16 queries during the pass over their sequence
    Floats largest = all(-INFINITY), total = {};

    // Convert the scores of 64 tokens to weights, for each of `rows` queries; a query attends to its first `visible`
    // tokens. Returns the factor of the earlier sums.
    template <class T> Floats weigh(long rows, float* scores, const long* visible, float scale, T* weights) {
        const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Floats most[LANES] = {}, sum_of_weights[LANES] = {};
        for (long r = 0; r < rows; r++) {
            most[r] = all(-INFINITY);
            for (long v = 0; v < VECTORS; v++) {
                float* at = scores + r * PANEL + v * LANES;
                const Floats score = pick(lane + (int)(v * LANES) < (int)visible[r], load(at) * scale, all(-INFINITY));
                store(at, score);
                most[r] = larger(score, most[r]);
            }
        }
        const Floats before = largest;
        largest = larger(largests(most), before);
        const Floats base = pick(largest == -INFINITY, Floats{}, largest);  // without a token, the weights are zeros
        for (long r = 0; r < rows; r++)
            for (long v = 0; v < VECTORS; v++) {
                const Floats weight = exp(load(scores + r * PANEL + v * LANES) - base[r]);
                sum_of_weights[r] += weight;
                store(weights + r * PANEL + v * LANES, weight);
            }
        const Floats shrink = pick(before == largest, all(1.0f), exp(before - base));
        total = total * shrink + sums(sum_of_weights);
        return shrink;
    }
};

// `count` queries from `first` on, of one sequence and one KV head. The last query attends to the whole sequence.
template <class T>
void attend_to_tile(const T* query, const T* keys, const T* values, const int32_t* table, long context, long first,
                    long count, T* output, const Shape& shape, long kv_head, float scale) {
    const long dim = shape.head_dim, group = shape.heads / shape.kv_heads, rows = count * group;
    const long num_panels = (dim + PANEL - 1) / PANEL, length = context + first + count;
    Room<T> queries(rows * dim), weights(rows * PANEL);
    Room<T> key_panel(PANEL * dim), value_panels(num_panels * PANEL * PANEL);
    Room<float> scores(rows * PANEL), outputs(num_panels * rows * PANEL);  // sums of values: [panels][rows][64]
    std::vector<Rows> states((rows + LANES - 1) / LANES);
    for (long r = 0; r < rows; r++) {
        const T* from = query + (first + r / group) * shape.query_stride + (kv_head * group + r % group) * dim;
        std::memcpy((void*)(queries.begin + r * dim), from, dim * sizeof(T));
    }
    for (long token = 0; token < length; token += PANEL) {
        const long num_tokens = std::min(PANEL, length - token);
        long at[PANEL];
        for (long t = 0; t < PANEL; t++)  // after the end, which no query attends to, its key is repeated
            at[t] = shape.offset_of(table, std::min(token + t, length - 1)) + kv_head * dim;
        pack_keys(keys, at, dim, key_panel.begin);
        pack_values(values, at, num_tokens, dim, value_panels.begin);
        std::fill_n(scores.begin, rows * PANEL, 0.0f);
        multiply_all(queries.begin, key_panel.begin, scores.begin, rows, dim);
        for (long from = 0; from < rows; from += LANES) {
            const long some = std::min((long)LANES, rows - from);
            long visible[LANES];
            for (long r = 0; r < some; r++) visible[r] = context + first + (from + r) / group + 1 - token;
            const long at = from * PANEL;
            float* of_rows = scores.begin + at;
            const Floats shrink = states[from / LANES].weigh(some, of_rows, visible, scale, weights.begin + at);
            for (long r = 0; r < some; r++)
                for (long p = 0; shrink[r] != 1.0f && p < num_panels; p++)
                    for (long v = 0; v < VECTORS; v++) {
                        float* sums = outputs.begin + (p * rows + from + r) * PANEL + v * LANES;
                        store(sums, load(sums) * shrink[r]);
                    }
        }
        for (long p = 0; p < num_panels; p++) {
            float* sums = outputs.begin + p * rows * PANEL;
            multiply_all(weights.begin, value_panels.begin + p * PANEL * PANEL, sums, rows, PANEL);
        }
    }
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < dim; i += LANES) {
            const Floats sums = load(outputs.begin + (i / PANEL * rows + r) * PANEL + i % PANEL);
            T* to = output + ((first + r / group) * shape.heads + kv_head * group + r % group) * dim;
            store(to + i, sums / states[r / LANES].total[r % LANES]);
        }
}

// Sequences with several new tokens: those of sequence s are starts[s]..starts[s + 1], the last of its lengths[s].
template <class T>
void attend_to_prompts(const T* query, const T* keys, const T* values, const int32_t* tables, const int32_t* starts,
                       const int32_t* lengths, T* output, const Shape& shape, float scale, int threads) {
    const long group = shape.heads / shape.kv_heads, tile = std::max(1L, TILE_ROWS / group);
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

template <class T>
void store_kv(const T* key, const T* value, T* keys, T* values, const int64_t* slots, long tokens, long width,
              long key_stride, long value_stride) {
    for (long t = 0; t < tokens; t++) {
        std::memcpy(keys + slots[t] * width, key + t * key_stride, width * sizeof(T));
        std::memcpy(values + slots[t] * width, value + t * value_stride, width * sizeof(T));
    }
}

}  // namespace
