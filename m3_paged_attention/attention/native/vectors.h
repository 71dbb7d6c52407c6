// Vectors of sixteen floats, and the two precisions in which they are stored.
//
// The vectors are the compiler's extension, so the compiler selects the processor's instructions. Only products of pairs
// (linear.h, attention.h) and conversions (here, int8.h) need intrinsics, because compilers do not generate them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

struct bfloat16 { uint16_t bits; };  // the upper half of a float
struct fp8 { uint8_t bits; };        // e4m3: sign, 4 bits of exponent, 3 of mantissa; no infinity

template <class To, class From> inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

template <class V> inline V read(const void* from) {
    V vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
}

inline Floats all(float x) { return x - Floats{}; }
inline Floats pick(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }

inline Floats load(const float* from) { return read<Floats>(from); }
inline Floats load(const bfloat16* from) {
#if defined(__AVX512F__)
    return (Floats)((Words)_mm512_cvtepu16_epi32(read<__m256i>(from)) << 16);  // GCC 12 takes five instructions
#else
    return (Floats)(__builtin_convertvector(read<Halves>(from), Words) << 16);
#endif
}
inline Ints integers(const void* from) {  // of 16 signed bytes
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(read<__m128i>(from));  // GCC 12 takes nine instructions
#else
    return __builtin_convertvector(__builtin_convertvector(read<Bytes>(from), Shorts), Ints);
#endif
}
inline Floats load(const int8_t* from) { return __builtin_convertvector(integers(from), Floats); }
inline Floats load(const fp8* from) {
#if defined(__AVX512BW__)
    // Exponent and mantissa of a half are one bit longer and seven; its exponent is larger by 8.
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(read<__m128i>(from)), 7);
    return (Floats)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xbf80))) * 256.0f;
#else
    const Ints byte = integers(from);  // the sign is in the upper bits, too
    const Ints low = (byte & 0x7f) << 20;
    const Floats small = (Floats)(low + (121 << 23)) - 0.015625f;  // 2^-6: without an exponent there is no leading one
    const Floats size = pick(low < (1 << 23), small, (Floats)(low + (120 << 23)));
    return (Floats)((Ints)size | (byte & (int32_t)0x80000000));
#endif
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }
inline void store(bfloat16* to, Floats v) {  // to the nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)v);  // zero for numbers below 2^-126
#else
    Words word = (Words)v;
    Words is_nan = (Words)((word & 0x7fffffffu) > 0x7f800000u);
    Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    Halves halves = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), Halves);
#endif
    std::memcpy(to, &halves, sizeof(halves));
}
inline Ints rounded(Floats v) { return (Ints)(v + 12582912.0f) - 0x4b400000; }  // to even at ties, as in `exp`
inline void store(int8_t* to, Floats v) {  // from -127 to 127
    const Bytes bytes = __builtin_convertvector(rounded(v), Bytes);
    std::memcpy(to, &bytes, sizeof(bytes));
}
inline void store(int16_t* to, Floats v) {
    const Shorts shorts = __builtin_convertvector(rounded(v), Shorts);
    std::memcpy(to, &shorts, sizeof(shorts));
}
inline void store(fp8* to, Floats v) {  // to the nearest, ties to even; 448 for more
    const Ints word = (Ints)v, size = word & 0x7fffffff;
    const Ints large = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3);
    const Ints small = (Ints)((Floats)size + 16384.0f) - 0x46800000;  // below 2^-6, in units of 2^-9
    const Ints is_small = size < (121 << 23), is_most = large > 0x7e;
    const Ints code = (is_small & small) | (~is_small & ((is_most & 0x7e) | (~is_most & large)));
    const Bytes bytes = __builtin_convertvector(code | ((word >> 24) & 0x80), Bytes);
    std::memcpy(to, &bytes, sizeof(bytes));
}

inline float load_one(const float* from) { return *from; }
inline float load_one(const bfloat16* from) { return bits_of<float>((uint32_t)from->bits << 16); }
inline void store_one(float* to, float x) { *to = x; }
inline void store_one(bfloat16* to, float x) {
    uint32_t word = bits_of<uint32_t>(x);
    bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    to->bits = is_nan ? 0x7fc0 : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
}

inline float sum(Floats v) {  // always in the same order
    float x[LANES];
    std::memcpy(x, &v, sizeof(x));
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

// GCC's name and clang's for: lanes of `a` (0 to 15) and `b` (16 to 31) in this order
#if defined(__clang__)
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// Reduce the lanes of each of 16 vectors, with one result in each lane: bitwise `sum` of each vector, if `both` adds.
// Halves of two vectors are joined at once: 16 vectors become 8, then 4, 2 and 1.
template <class Join> inline Floats join(const Floats* v, Join both) {
    Floats a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = both(LANES_OF(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                    LANES_OF(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    for (int i = 0; i < 4; i++)
        b[i] = both(LANES_OF(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                    LANES_OF(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    for (int i = 0; i < 2; i++)
        c[i] = both(LANES_OF(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                    LANES_OF(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    return both(LANES_OF(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                LANES_OF(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}

inline Floats larger(Floats a, Floats b) { return pick(a > b, a, b); }

inline Floats sums(const Floats* v) {
    return join(v, [](Floats a, Floats b) { return a + b; });
}
inline Floats largests(const Floats* v) { return join(v, larger); }

// 16 vectors of 16 numbers: rows become columns. In blocks of 8 x 8 numbers, then 4 x 4, 2 x 2, and one by one.
template <class V> inline void transpose(V* v) {
    const auto swap = [v](int step, auto one, auto other) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                const V a = v[i], b = v[i + step];
                v[i] = one(a, b);
                v[i + step] = other(a, b);
            }
    };
    swap(8, [](V a, V b) { return LANES_OF(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23); },
         [](V a, V b) { return LANES_OF(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31); });
    swap(4, [](V a, V b) { return LANES_OF(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27); },
         [](V a, V b) { return LANES_OF(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31); });
    swap(2, [](V a, V b) { return LANES_OF(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29); },
         [](V a, V b) { return LANES_OF(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31); });
    swap(1, [](V a, V b) { return LANES_OF(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30); },
         [](V a, V b) { return LANES_OF(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31); });
}

// e^x within two units in the last place; 0 below e^-87, infinity far above, NaN stays NaN.
inline Floats exp(Floats x) {
    const Floats inside = pick(x > 89.0f, all(89.0f), x);
    const Floats shifted = inside * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the addition rounds to a whole number
    const Floats whole = shifted - 12582912.0f;
    const Floats rest = (inside - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
    Floats p = all(1.9875691500e-4f);
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 is_more = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-87.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(is_more, (__m512)p, (__m512)whole);  // p * 2^whole
#else
    const Floats power = (Floats)(((Ints)shifted - 0x4b400000 + 127) << 23);
    return pick(x < -87.0f, Floats{}, pick(x > 88.0f, all(INFINITY), p * power));
#endif
}

// Prefetch `size` elements into the core's second cache: the first one supports too few outstanding requests.
// INTO_FIRST: into the first one, for tiles of few rows (amx.h), which do nothing but wait for weights.
template <bool INTO_FIRST = false, class T> inline void fetch(const T* from, long size) {
    for (long i = 0; i < size; i += 64 / (long)sizeof(T)) __builtin_prefetch(from + i, 0, INTO_FIRST ? 3 : 2);
}

}  // namespace
