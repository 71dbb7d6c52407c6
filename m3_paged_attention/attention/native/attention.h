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
//
// KV may be stored in another type K than the model's T. Numbers are converted in registers. A scale is a factor of its
// token: of the score in keys, of the softmax weight in values.

#pragma once

#include <cfloat>
#include <map>
#include <type_traits>
#include <vector>

#include "linear.h"

namespace {

constexpr long CHUNK = LANES;  // tokens
constexpr long MAX_HEADS = 4;  // query heads of one KV head that share a key while it is in a register

enum KVType { OWN, BFLOAT16, INT8, FP8 };  // native_step.py has the same numbers

template <class K> constexpr bool SCALED = sizeof(K) == 1;
template <class K> constexpr float LARGEST = std::is_same_v<K, fp8> ? 448.0f : sizeof(K) == 1 ? 127.0f : 32767.0f;
template <class T, class K> constexpr bool IS_OWN = std::is_same_v<T, K>;

// The type of queries for keys K. 16 bits with a scale are more precise than bfloat16, and multiplied in pairs.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
template <class T, class K> constexpr bool IN_PAIRS = IS_OWN<T, bfloat16> && IS_OWN<K, int8_t>;
#else
template <class T, class K> constexpr bool IN_PAIRS = false;
#endif
template <class T, class K>
using Query = std::conditional_t<IS_OWN<T, K>, T, std::conditional_t<IN_PAIRS<T, K>, int16_t, float>>;

// Call `run` with pointers to keys and values of their type.
template <class T, class F> void with_type(int type, const void* keys, const void* values, F run) {
    switch (type) {
        case BFLOAT16: return run((bfloat16*)keys, (bfloat16*)values);
        case INT8: return run((int8_t*)keys, (int8_t*)values);
        case FP8: return run((fp8*)keys, (fp8*)values);
        default: return run((T*)keys, (T*)values);
    }
}

struct Shape {  // queries of [num_seqs] sequences over [blocks, block_size, kv_heads, head_dim] keys and values
    long num_seqs, heads, kv_heads, head_dim, block_size;
    long query_stride;  // elements from the query of one token to that of the next
    long table_stride;  // the same for block tables

    // The scales of a block are behind its numbers: float [kv_heads, block_size].
    template <class K> long block_elements() const {
        return block_size * kv_heads * (head_dim + (SCALED<K> ? (long)sizeof(float) : 0));
    }
    // Offset of the keys and values of the token at `place` of a block, in elements.
    template <class K> long offset_of(long block, long place) const {
        return block * block_elements<K>() + place * kv_heads * head_dim;
    }
    // Offset of the scale of its first head, in floats.
    template <class K> long scale_of(long block, long place) const {
        return offset_of<K>(block, block_size) / (long)sizeof(float) + place;
    }
};

template <class K, long N> struct Places {  // of tokens of a sequence: offsets in elements, and in floats of scales
    long count, at[N], scales[N];

    // Up to N tokens from `token` on. With `repeats`, the last one is repeated until there are N.
    Places(const int32_t* table, long token, long length, const Shape& shape, bool repeats = false) {
        count = std::max(0L, std::min(N, length - token));
        if (!count) return;
        const long width = shape.kv_heads * shape.head_dim;
        long entry = token / shape.block_size, place = token % shape.block_size, block = table[entry];
        for (long t = 0; t < count; t++, place++) {  // a division takes longer than the rest
            if (place == shape.block_size) block = table[++entry], place = 0;
            at[t] = shape.offset_of<K>(block, 0) + place * width;
            if constexpr (SCALED<K>) scales[t] = shape.scale_of<K>(block, place);
        }
        for (long t = count; repeats && t < N; t++) at[t] = at[count - 1];
    }

    // The scales of a KV head of these tokens, zeros after the end. `numbers`: the keys or values of the whole layer.
    void read_scales(const K* numbers, long kv_head, const Shape& shape, float* to) const {
        const float* from = (const float*)numbers + kv_head * shape.block_size;
        for (long t = 0; t < N; t++) to[t] = t < count ? from[scales[t]] : 0.0f;
    }
};
template <class K> using Chunk = Places<K, CHUNK>;

template <class Q> struct Head {  // state of one query head during the pass over its sequence
    const Q* query;
    float scale;  // of the products
    float* output;  // [head_dim]
    float largest = -INFINITY, total = 0.0f;
};

// Numbers of one type as another; `size` is a multiple of 16.
template <class From, class To> inline void convert(const From* from, long size, To* to) {
    for (long i = 0; i < size; i += LANES) store(to + i, load(from + i));
}

// Store a vector with a scale, which is returned. A vector with NaN or infinity gets a scale that is not finite.
template <class T, class K> inline float quantize(const T* from, long dim, K* to) {
    Ints largest = {};  // of the bits without the sign: they are ordered as the numbers are, with NaN above all
    for (long i = 0; i < dim; i += LANES) {
        const Ints size = (Ints)load(from + i) & 0x7fffffff, is_larger = size > largest;
        largest = (is_larger & size) | (~is_larger & largest);
    }
    int32_t most = 0;
    for (int lane = 0; lane < LANES; lane++) most = std::max(most, largest[lane]);
    const float scale = bits_of<float>(most) / LARGEST<K>;
    const float inverse = scale >= FLT_MIN && scale <= FLT_MAX ? 1.0f / scale : 0.0f;
    for (long i = 0; i < dim; i += LANES) store(to + i, load(from + i) * inverse);
    return scale;
}

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

inline Ints add_products(Ints sum, const int16_t* a, const int8_t* b) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, read<__m512i>(a), _mm512_cvtepi8_epi16(read<__m256i>(b)));
#else
    return sum;  // not used
#endif
}
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
    Floats products[HEADS][CHUNK] = {};
    for (long t = 0; t < chunk.count; t++) {
        const K* key = keys + chunk.at[t];
        if (t < next.count) fetch(keys + next.at[t], dim);
        Sums product[HEADS] = {};
        for (long i = 0; i < dim; i += 2 * LANES)
            for (int h = 0; h < HEADS; h++) product[h] = add_products(product[h], heads[h].query + i, key + i);
        for (int h = 0; h < HEADS; h++) products[h][t] = floats(product[h]);
    }
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
    // tokens. Returns the factor of the earlier sums. The scales of the tokens: [64] each, or null.
    template <bool IS_SCALED, class T>
    Floats weigh(long rows, float* scores, const long* visible, float scale, T* weights, const float* key_scales,
                 const float* value_scales) {
        const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Floats most[LANES] = {}, sum_of_weights[LANES] = {};
        for (long r = 0; r < rows; r++) {
            most[r] = all(-INFINITY);
            for (long v = 0; v < VECTORS; v++) {
                float* at = scores + r * PANEL + v * LANES;
                Floats product = load(at) * scale;
                if constexpr (IS_SCALED) product *= load(key_scales + v * LANES);
                const Floats score = pick(lane + (int)(v * LANES) < (int)visible[r], product, all(-INFINITY));
                store(at, score);
                most[r] = larger(score, most[r]);
            }
        }
        const Floats before = largest;
        largest = larger(largests(most), before);
        const Floats base = pick(largest == -INFINITY, Floats{}, largest);  // without a token, the weights are zeros
        for (long r = 0; r < rows; r++)
            for (long v = 0; v < VECTORS; v++) {
                Floats weight = exp(load(scores + r * PANEL + v * LANES) - base[r]);
                sum_of_weights[r] += weight;
                if constexpr (IS_SCALED) weight *= load(value_scales + v * LANES);
                store(weights + r * PANEL + v * LANES, weight);
            }
        const Floats shrink = pick(before == largest, all(1.0f), exp(before - base));
        total = total * shrink + sums(sum_of_weights);
        return shrink;
    }
};

// Queries of one KV head that read the same keys and values, and the state of their pass.
template <class T, class K> struct Tile {
    const long rows, dim, num_panels;
    Room<T> queries, weights, key_panel, value_panels, unpacked;
    Room<float> scales, scores, outputs;  // scales: of keys, and of values; outputs: sums of values, [panels][rows][64]
    std::vector<Rows> states;

    Tile(long rows, long dim)
        : rows(rows), dim(dim), num_panels((dim + PANEL - 1) / PANEL), queries(rows * dim), weights(rows * PANEL),
          key_panel(PANEL * dim), value_panels(num_panels * PANEL * PANEL),
          unpacked(IS_OWN<T, K> ? 0 : 2 * PANEL * dim), scales(2 * PANEL), scores(rows * PANEL),
          outputs(num_panels * rows * PANEL), states((rows + LANES - 1) / LANES) {}

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
            std::fill_n(scores.begin, rows * PANEL, 0.0f);
            multiply_all(queries.begin, key_panel.begin, scores.begin, rows, dim);
            for (long from = 0; from < rows; from += LANES) {
                const long some = std::min((long)LANES, rows - from);
                long visible[LANES];
                for (long r = 0; r < some; r++)
                    visible[r] = length - token - (group ? (rows - 1 - from - r) / group : 0);
                weigh(from, some, visible, scale);
            }
            for (long p = 0; p < num_panels; p++) {
                float* sums = outputs.begin + p * rows * PANEL;
                multiply_all(weights.begin, value_panels.begin + p * PANEL * PANEL, sums, rows, PANEL);
            }
        }
    }

    // Copy the keys and values of up to 64 tokens into panels.
    void pack(const K* keys, const K* values, const int32_t* table, long token, long length, const Shape& shape,
              long kv_head) {
        const long num_tokens = std::min(PANEL, length - token);
        Places<K, PANEL> places(table, token, length, shape, true);  // no query attends to what is after the end
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

// Sequences with several new tokens: those of sequence s are starts[s]..starts[s + 1], the last of its lengths[s].
template <class T, class K>
void attend_to_prompts(const T* query, const K* keys, const K* values, const int32_t* tables, const int32_t* starts,
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

// Sequences whose tables begin with the same blocks: a system prompt, say, that many requests have. Their queries are a
// tile over its keys and values, which are read once for all of them. `attend` goes on behind it from the same sums.

constexpr long LEAST_ROWS = 16, LEAST_LENGTH = 2 * PANEL;  // of a tile, and of a beginning; below, it is not faster

template <class T, class K> struct Beginnings {
    std::vector<long> lengths;                  // [num_seqs]: tokens that are computed here
    std::vector<float> sums, largest, totals;   // [num_seqs, heads]: sums with [head_dim]

    Beginnings(const T* query, const K* keys, const K* values, const int32_t* tables, const int32_t* all_lengths,
               const Shape& shape, float scale, int threads)
        : lengths(shape.num_seqs, 0) {
        const long dim = shape.head_dim, group = shape.heads / shape.kv_heads;
        std::map<int32_t, std::vector<long>> by_block;
        for (long seq = 0; seq < shape.num_seqs; seq++)
            if (all_lengths[seq] > LEAST_LENGTH) by_block[tables[seq * shape.table_stride]].push_back(seq);
        struct Part { const long* seqs; long count, length; };  // sequences of one tile
        std::vector<Part> parts;
        for (const auto& [block, seqs] : by_block) {
            const long length = common(tables, all_lengths, seqs, shape), count = seqs.size();
            if (count * group < LEAST_ROWS || length < LEAST_LENGTH) continue;
            const long num_tiles = (count * group + TILE_ROWS - 1) / TILE_ROWS;
            for (long t = 0; t < num_tiles; t++) {
                const long from = t * count / num_tiles;
                parts.push_back({&seqs[from], (t + 1) * count / num_tiles - from, length});
            }
            for (long seq : seqs) lengths[seq] = length;
        }
        if (parts.empty()) return;
        sums.resize(shape.num_seqs * shape.heads * dim);
        largest.resize(shape.num_seqs * shape.heads), totals.resize(largest.size());
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
        for (size_t p = 0; p < parts.size(); p++)
            for (long kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
                const Part& part = parts[p];
                const long first = kv_head * group;
                Tile<T, K> tile(part.count * group, dim);
                for (long r = 0; r < tile.rows; r++)
                    tile.set_query(r, query + part.seqs[r / group] * shape.query_stride + (first + r % group) * dim);
                const int32_t* table = tables + part.seqs[0] * shape.table_stride;
                tile.attend(keys, values, table, part.length, 0, shape, kv_head, scale);
                for (long r = 0; r < tile.rows; r++) {
                    const long head = part.seqs[r / group] * shape.heads + first + r % group;
                    largest[head] = tile.largest(r), totals[head] = tile.total(r);
                    for (long i = 0; i < dim; i += LANES) store(&sums[head * dim + i], tile.sum(r, i));
                }
            }
    }

    // Number of tokens in the blocks with which the tables of all these sequences begin, in whole panels.
    static long common(const int32_t* tables, const int32_t* lengths, const std::vector<long>& seqs,
                       const Shape& shape) {
        const int32_t* one = tables + seqs[0] * shape.table_stride;
        long blocks = lengths[seqs[0]] / shape.block_size;
        for (long seq : seqs) {
            blocks = std::min(blocks, lengths[seq] / shape.block_size);
            blocks = std::mismatch(one, one + blocks, tables + seq * shape.table_stride).first - one;
        }
        return blocks * shape.block_size / PANEL * PANEL;
    }
};

template <class T, class K>
void attend(const T* query, const K* keys, const K* values, const int32_t* tables, const int32_t* lengths, T* output,
            const Shape& shape, float scale, int threads) {
    using Q = Query<T, K>;
    const long dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    const Beginnings<T, K> shared(query, keys, values, tables, lengths, shape, scale, threads);
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
                    if constexpr (IN_PAIRS<T, K>)
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

constexpr long STORED_ALONE = 1 << 15;  // elements that one thread stores faster than two

// The heads of one token.
template <class T, class K> inline void store_token(const T* from, K* to, const Shape& shape, long slot) {
    const long dim = shape.head_dim, width = shape.kv_heads * dim;
    if constexpr (IS_OWN<T, K>) {
        std::memcpy((void*)(to + slot * width), from, width * sizeof(T));
    } else if constexpr (SCALED<K>) {
        const long block = slot / shape.block_size, place = slot % shape.block_size;
        K* numbers = to + shape.offset_of<K>(block, place);
        float* scales = (float*)to + shape.scale_of<K>(block, place);
        for (long h = 0; h < shape.kv_heads; h++)
            scales[h * shape.block_size] = quantize(from + h * dim, dim, numbers + h * dim);
    } else {
        convert(from, width, to + slot * width);
    }
}

template <class T, class K>
void store_kv(const T* key, const T* value, K* keys, K* values, const int64_t* slots, long tokens, const Shape& shape,
              long key_stride, long value_stride, int threads) {
    if (tokens * shape.kv_heads * shape.head_dim <= STORED_ALONE) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < tokens; t++) {
        store_token(key + t * key_stride, keys, shape, slots[t]);
        store_token(value + t * value_stride, values, shape, slots[t]);
    }
}

}  // namespace
