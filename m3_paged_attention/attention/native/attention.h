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

#include "shared_prefixes.h"

namespace {

constexpr long CHUNK = LANES;  // tokens
constexpr long MAX_HEADS = 4;  // query heads of one KV head that share a key while it is in a register

template <class K> using Chunk = TokenOffsets<K, CHUNK>;

template <class Q> struct Head {  // state of one query head during the pass over its sequence
    const Q* query;
    float scale;  // of the products
    float* output;  // [head_dim]
    float largest = -INFINITY, total = 0.0f;
};

// The largest score, or 0 where all scores so far are minus infinity: then their weights are zeros, not NaN.
inline float finite(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// sum + a * b, 32 elements, in 16 lanes
template <class K> inline Floats add_products(Floats sum, const float* a, const K* b) {
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

// The scales of a KV head of a chunk; after its end, any.
template <class K>
inline Floats scales_of(const K* numbers, long kv_head, const Chunk<K>& chunk, const Shape& shape) {
    if (shape.block_size % CHUNK == 0)  // the chunk is in one block
        return load((const float*)numbers + kv_head * shape.block_size + chunk.scales[0]);
    float scales[CHUNK];
    chunk.read_scales(numbers, kv_head, shape, scales);
    return load(scales);
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
inline Ints add_products(Ints sum, const int16_t* a, const int8_t* b) {
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, read<__m512i>(a), _mm512_cvtepi8_epi16(read<__m256i>(b)));
}
#endif
inline Floats floats(Floats sum) { return sum; }
inline Floats floats(Ints sum) { return __builtin_convertvector(sum, Floats); }

// --8<-- [start:attend_chunk]
// Attention of HEADS query heads of one KV head over a chunk of its keys and values; the next chunk is prefetched.
template <class Q, class K, int HEADS>
void attend_chunk(Head<Q>* heads, const K* keys, const K* values, long kv_head, const Chunk<K>& chunk,
                  const Chunk<K>& next, const Shape& shape) {
    using Sums = std::conditional_t<IS_OWN<Q, int16_t>, Ints, Floats>;
    const long dim = shape.head_dim;
    Floats key_scales = {}, value_scales = {};
    if constexpr (SCALED<K>) {
        key_scales = scales_of(keys, kv_head, chunk, shape);
        value_scales = scales_of(values, kv_head, chunk, shape);
    }
    keys += kv_head * dim, values += kv_head * dim;
    Floats products[HEADS][CHUNK];
    for (long t = 0; t < chunk.count; t++) {
        const K* key = keys + chunk.at[t];
        if (t < next.count) fetch(keys + next.at[t], dim);
        Sums product[HEADS] = {};
        for (long i = 0; i < dim; i += 2 * LANES)
            for (int h = 0; h < HEADS; h++) product[h] = add_products(product[h], heads[h].query + i, key + i);
        for (int h = 0; h < HEADS; h++) products[h][t] = floats(product[h]);
    }
    for (long t = chunk.count; t < CHUNK; t++)
        for (int h = 0; h < HEADS; h++) products[h][t] = Floats{};
    alignas(64) float weights[HEADS][CHUNK];
    float shrink[HEADS];
    for (int h = 0; h < HEADS; h++) {
        float* scores = weights[h];
        if constexpr (SCALED<K>)
            store(scores, sums(products[h]) * heads[h].scale * key_scales);
        else
            store(scores, sums(products[h]) * heads[h].scale);
        float largest = heads[h].largest;
        for (long t = 0; t < chunk.count; t++) largest = std::max(largest, scores[t]);
        for (long t = chunk.count; t < CHUNK; t++) scores[t] = -INFINITY;
        const Floats weight = exp(load(scores) - finite(largest));
        shrink[h] = largest == heads[h].largest ? 1.0f : exp(all(heads[h].largest - finite(largest)))[0];
        heads[h].largest = largest;
        heads[h].total = heads[h].total * shrink[h] + sum(weight);
        if constexpr (SCALED<K>)
            store(weights[h], weight * value_scales);
        else
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

template <class Q, class K>
void attend_chunk(long num_heads, Head<Q>* heads, const K* keys, const K* values, long kv_head, const Chunk<K>& chunk,
                  const Chunk<K>& next, const Shape& shape) {
    switch (num_heads) {
        case 1: return attend_chunk<Q, K, 1>(heads, keys, values, kv_head, chunk, next, shape);
        case 2: return attend_chunk<Q, K, 2>(heads, keys, values, kv_head, chunk, next, shape);
        case 3: return attend_chunk<Q, K, 3>(heads, keys, values, kv_head, chunk, next, shape);
        default: return attend_chunk<Q, K, MAX_HEADS>(heads, keys, values, kv_head, chunk, next, shape);
    }
}

// One query per sequence; `shared`: of these tables.
template <class T, class K>
void attend(const T* query, const K* keys, const K* values, const int32_t* tables, const int32_t* lengths, T* output,
            const Shape& shape, float scale, int threads, SharedPrefixes& shared) {
    using Q = Query<T, K>;
    const long dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    shared.attend(query, keys, values, tables, shape, scale, threads);
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
            const long begin = shared.lengths[seq], head = seq * shape.heads + first * group;
            if (begin) std::copy_n(&shared.sums[head * dim], num_heads * dim, sums.begin());
            std::vector<Head<Q>> heads(num_heads);
            std::vector<Q> converted(IS_OWN<T, K> ? 0 : num_heads * dim);
            for (long h = 0; h < num_heads; h++) {
                heads[h].scale = scale, heads[h].output = &sums[h * dim];
                if (begin) heads[h].largest = shared.largest[head + h], heads[h].total = shared.totals[head + h];
                if constexpr (IS_OWN<T, K>) {
                    heads[h].query = from + h * dim;
                } else {
                    Q* to = &converted[h * dim];
                    heads[h].query = to;
                    if constexpr (IN_PAIRS<K>)
                        heads[h].scale *= quantize(from + h * dim, dim, to);
                    else
                        convert(from + h * dim, dim, to);
                }
            }
            Chunk<K> next(table, begin, length, shape);
            for (long token = begin; token < length; token += CHUNK) {
                const Chunk<K> chunk = next;
                next = Chunk<K>(table, token + CHUNK, length, shape);
                for (long h = 0; h < num_heads; h += std::min(MAX_HEADS, group - h % group))
                    attend_chunk(group - h % group, &heads[h], keys, values, first + h / group, chunk, next, shape);
            }
            for (long h = 0; h < num_heads; h++)
                for (long i = 0; i < dim; i += LANES)
                    store(to + h * dim + i, load(heads[h].output + i) / (length ? heads[h].total : 1.0f));
        }
}

}  // namespace
