// KV in blocks, in the type of the model or in another one.
//
// KV may be stored in another type K than the model's T. Numbers are converted in registers. A scale is a factor of its
// token: of the score in keys, of the softmax weight in values.

#pragma once

#include <cfloat>
#include <type_traits>

#include "vectors.h"

namespace {

enum KVType { OWN, BFLOAT16, INT8, FP8 };  // native_step.py has the same numbers

template <class K> constexpr bool SCALED = sizeof(K) == 1;
template <class K> constexpr float LARGEST = std::is_same_v<K, fp8> ? 448.0f : sizeof(K) == 1 ? 127.0f : 32767.0f;
template <class T, class K> constexpr bool IS_OWN = std::is_same_v<T, K>;

// The type of queries for keys K. 16 bits with a scale are far more precise than int8 keys, and multiplied in pairs.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
template <class K> constexpr bool IN_PAIRS = IS_OWN<K, int8_t>;
#else
template <class K> constexpr bool IN_PAIRS = false;
#endif
template <class T, class K>
using Query = std::conditional_t<IS_OWN<T, K>, T, std::conditional_t<IN_PAIRS<K>, int16_t, float>>;

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

template <class K, long N> struct TokenOffsets {  // of a sequence: in elements, and of scales in floats
    long count, at[N], scales[N];

    // Up to N tokens from `token` on. With `repeats`, the last one is repeated until there are N.
    TokenOffsets(const int32_t* table, long token, long length, const Shape& shape, bool repeats = false) {
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
