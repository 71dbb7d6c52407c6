// The kernels of the `native` backend: what a CPU can do with KV in blocks when nobody copies them first.
//
// Compiled on the machine that runs them (native_library.py), so there is one source and no table of processors. The
// vectors are the compiler's own, 16 floats wide, and become whatever the processor has. The one exception is the
// product of pairs of bfloat16, which compilers do not find by themselves.
//
// All arithmetic is in float32. What a row becomes never depends on the rows beside it: a request gets bit for bit the
// same numbers alone and in a batch.
//
//     1. vectors        load, store, sum, exp
//     2. linear maps    weights in panels, read once for up to six rows
//     3. attention      over the blocks of a table: one new token per sequence, then many
//     4. the rest       norms, rotary, SiLU, KV store

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// ---------------------------------------------------------------------------------------------------- 1. vectors

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct bfloat16 { uint16_t bits; };  // the upper half of a float

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

inline Floats load(const float* from) { return read<Floats>(from); }
inline Floats load(const bfloat16* from) {
    return (Floats)(__builtin_convertvector(read<Halves>(from), Words) << 16);
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }
inline void store(bfloat16* to, Floats v) {  // to the nearest, ties to even; NaN stays NaN
    Words word = (Words)v;
    Words is_nan = (Words)((word & 0x7fffffffu) > 0x7f800000u);
    Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    Halves halves = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), Halves);
    std::memcpy(to, &halves, sizeof(halves));
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

// The sums of 16 vectors, one in each lane, bit for bit as `sum` gives them. Halves of two vectors are added at once:
// 16 vectors become 8, then 4, 2 and 1.
inline Floats sums(const Floats* v) {
    Floats a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = LANES_OF(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               LANES_OF(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        b[i] = LANES_OF(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               LANES_OF(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = LANES_OF(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               LANES_OF(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return LANES_OF(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           LANES_OF(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

inline Floats pick(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }

// e^x within two units in the last place; 0 far below, infinity far above, NaN stays NaN.
inline Floats exp(Floats x) {
    Ints too_small = x < -87.0f, too_large = x > 88.0f;
    Floats inside = pick(too_small | too_large, Floats{}, x);
    Floats shifted = inside * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the addition rounds to a whole number
    Floats whole = shifted - 12582912.0f;
    Floats rest = (inside - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts
    Floats p = all(1.9875691500e-4f);
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    Floats power = (Floats)(((Ints)shifted - 0x4b400000 + 127) << 23);
    return pick(too_small, Floats{}, pick(too_large, all(INFINITY), p * power));
}

// Have `size` elements brought into the core's second cache: the first has room for too few requests on their way.
template <class T> inline void fetch(const T* from, long size) {
    for (long i = 0; i < size; i += 64 / (long)sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

// ------------------------------------------------------------------------------------------------ 2. linear maps
//
// Decoding is waiting for weights: each is used once per row, and there are few rows. So they lie in the order in which
// they are read, in panels of 64 output features:
//
//     [out_features / 64][in_features / PAIR][64][PAIR]      PAIR: 1 float or 2 bfloat16, four bytes
//
// A group of up to six rows keeps its 6 x 64 sums in registers while a panel streams past. Missing features are zeros.

constexpr long PANEL = 64, VECTORS = PANEL / LANES;
constexpr long GROUP = 6;         // rows whose sums fit into 32 registers beside a piece of a panel
constexpr long ROW_BLOCK = 96;    // rows that share a panel while it is in the cache
constexpr long DEPTH_BLOCK = 512;  // input features of a panel at a time: 64 or 128 KiB, less than a core's own cache

constexpr long AHEAD = 8192;       // bytes between what is read and what is fetched

template <class T> constexpr long PAIR = 4 / sizeof(T);

inline Floats add_product(Floats sum, const float* weights, const float* x) { return sum + load(weights) * all(*x); }
inline Floats add_product(Floats sum, const bfloat16* weights, const bfloat16* x) {
    uint32_t pair = read<uint32_t>(x);
#if defined(__AVX512BF16__)
    const __m512bh pairs = (__m512bh)_mm512_set1_epi32((int)pair);
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)read<__m512i>(weights), pairs);
#else
    Words words = read<Words>(weights);
    sum += (Floats)(words << 16) * all(bits_of<float>(pair << 16));
    return sum + (Floats)(words & 0xffff0000u) * all(bits_of<float>(pair & 0xffff0000u));
#endif
}

// sums [ROWS][PANEL] += x [ROWS][from..to] * panel [from..to][PANEL]; `ahead`, from..to, is fetched meanwhile
template <class T, int ROWS>
__attribute__((noinline))  // or its sums share registers with whoever calls
void multiply(const T* x, const T* panel, float* sums, long in, long from, long to, const T* ahead) {
    Floats s[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) s[r][v] = load(sums + r * PANEL + v * LANES);
    for (long k = from; k < to; k += PAIR<T>) {
        for (int v = 0; v < VECTORS; v++) {
            fetch(ahead + k * PANEL + v * LANES * PAIR<T>, 1);
            for (int r = 0; r < ROWS; r++)
                s[r][v] = add_product(s[r][v], panel + k * PANEL + v * LANES * PAIR<T>, x + r * in + k);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + v * LANES, s[r][v]);
}

template <class T>
inline void multiply(long rows, const T* x, const T* panel, float* sums, long in, long from, long to, const T* ahead) {
    switch (rows) {
        case 1: return multiply<T, 1>(x, panel, sums, in, from, to, ahead);
        case 2: return multiply<T, 2>(x, panel, sums, in, from, to, ahead);
        case 3: return multiply<T, 3>(x, panel, sums, in, from, to, ahead);
        case 4: return multiply<T, 4>(x, panel, sums, in, from, to, ahead);
        case 5: return multiply<T, 5>(x, panel, sums, in, from, to, ahead);
        default: return multiply<T, GROUP>(x, panel, sums, in, from, to, ahead);
    }
}

// y [rows][out] = x [rows][in] * weights + bias
template <class T>
void linear(const T* x, const T* packed, const T* bias, T* y, long rows, long in, long out, int threads) {
    const long num_panels = (out + PANEL - 1) / PANEL, num_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (long block = 0; block < num_blocks; block++)
        for (long p = 0; p < num_panels; p++) {
            const long first = block * ROW_BLOCK, count = std::min(ROW_BLOCK, rows - first);
            const long feature = p * PANEL, width = std::min(PANEL, out - feature);
            const T *panel = packed + feature * in, *next = p + 1 < num_panels ? panel + PANEL * in : panel;
            alignas(64) float sums[ROW_BLOCK * PANEL], start[PANEL] = {};
            if (bias)
                for (long i = 0; i < width; i++) start[i] = load_one(bias + feature + i);
            for (long r = 0; r < count; r++) std::memcpy(sums + r * PANEL, start, sizeof(start));
            const long num_groups = (count + GROUP - 1) / GROUP;
            for (long from = 0; from < in; from += DEPTH_BLOCK) {
                const long to = std::min(in, from + DEPTH_BLOCK);
                for (long g = 0; g < num_groups; g++) {  // of equal size: 8 rows are 4 and 4
                    const long r = g * count / num_groups, size = (g + 1) * count / num_groups - r;
                    // The first group waits for memory. While the last one works on what is there, memory is free.
                    const T* ahead = g > 0 && g + 1 == num_groups ? next : panel + AHEAD / (long)sizeof(T);
                    multiply(size, x + (first + r) * in, panel, sums + r * PANEL, in, from, to, ahead);
                }
            }
            for (long r = 0; r < count; r++) {
                T* to = y + (first + r) * out + feature;
                if (width == PANEL)
                    for (long v = 0; v < VECTORS; v++) store(to + v * LANES, load(sums + r * PANEL + v * LANES));
                else
                    for (long i = 0; i < width; i++) store_one(to + i, sums[r * PANEL + i]);
            }
        }
}

template <class T> void pack(const T* weight, T* packed, long in, long out, int threads) {
    const long num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < num_panels; p++)
        for (long k = 0; k < in; k += PAIR<T>)
            for (long i = 0; i < PANEL; i++)
                for (long j = 0; j < PAIR<T>; j++) {
                    const long feature = p * PANEL + i;
                    packed[(p * in + k) * PANEL + i * PAIR<T> + j] = feature < out ? weight[feature * in + k + j] : T{};
                }
}

// -------------------------------------------------------------------------------------------------- 3. attention
//
// One pass over the keys and values of a sequence, 16 tokens at a time, where they lie. Nobody knows the largest score
// before the end, so the sums are kept relative to the largest so far and scaled down when a larger one comes:
//
//     largest' = max(largest, scores)      scale = e^(largest - largest')
//     total'   = total * scale + sum e^(scores - largest')
//     output'  = output * scale + sum e^(scores - largest') * values
//
// and the result is output / total: the softmax, without a second pass.

constexpr long CHUNK = LANES;  // tokens
constexpr long MAX_HEADS = 4;  // query heads of one KV head that share a key while it is in a register

struct Shape {  // queries of [num_seqs] sequences over [blocks, block_size, kv_heads, head_dim] keys and values
    long num_seqs, heads, kv_heads, head_dim, block_size;
    long query_stride;  // elements from the query of one token to that of the next
    long table_stride;  // the same for block tables

    // Where the keys and values of a token begin.
    long offset_of(const int32_t* table, long token) const {
        return (table[token / block_size] * block_size + token % block_size) * kv_heads * head_dim;
    }
};

struct Chunk {  // some tokens of a sequence, and where the keys and values of their first head begin
    long count, at[CHUNK];

    Chunk(const int32_t* table, long token, long length, const Shape& shape) {
        count = std::max(0L, std::min(CHUNK, length - token));
        for (long t = 0; t < count; t++) at[t] = shape.offset_of(table, token + t);
    }
};

template <class T> struct Head {  // one query head on its way through its sequence
    const T* query;
    float* output;  // [head_dim]
    float largest = -INFINITY, total = 0.0f;
};

// The largest score, if there is one: where all so far were minus infinity, their weights are zeros and no NaN.
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

// --8<-- [start:see]
// HEADS query heads of one KV head, whose keys and values begin at `first`, see a chunk and have the next one fetched.
template <class T, int HEADS>
void see(Head<T>* heads, const T* keys, const T* values, const Chunk& chunk, const Chunk& next, long dim, float scale) {
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
// --8<-- [end:see]

template <class T>
void see(long num_heads, Head<T>* heads, const T* keys, const T* values, const Chunk& chunk, const Chunk& next,
         long dim, float scale) {
    switch (num_heads) {
        case 1: return see<T, 1>(heads, keys, values, chunk, next, dim, scale);
        case 2: return see<T, 2>(heads, keys, values, chunk, next, dim, scale);
        case 3: return see<T, 3>(heads, keys, values, chunk, next, dim, scale);
        default: return see<T, MAX_HEADS>(heads, keys, values, chunk, next, dim, scale);
    }
}

template <class T>
void attend(const T* query, const T* keys, const T* values, const int32_t* tables, const int32_t* lengths, T* output,
            const Shape& shape, float scale, int threads) {
    const long dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    // A thread takes whole tokens, which lie in one piece. Only where sequences are few do threads share a sequence.
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
                    see(group - h % group, &heads[h], keys + at, values + at, chunk, next, dim, scale);
                }
            }
            for (long h = 0; h < num_heads; h++)
                for (long i = 0; i < dim; i += LANES)
                    store(to + h * dim + i, load(heads[h].output + i) / (length ? heads[h].total : 1.0f));
        }
}

// Prompts: many queries, so the products are those of section 2. 64 tokens at a time, keys and values are copied into
// panels, and a tile of queries is multiplied with them: scores with the keys, their softmax with the values.

constexpr long TILE_ROWS = 96;  // queries of one KV head that use a copy of keys and values

template <class T> struct Room {  // for some elements, on a cache line's border
    std::vector<char> memory;
    T* begin;
    explicit Room(long size) : memory(size * sizeof(T) + 64) {
        begin = (T*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    }
};

// Keys as a panel whose features are tokens: [dim / PAIR][64 tokens][PAIR]. Four bytes move at a time.
template <class T> void pack_keys(const T* keys, const long* at, long count, long dim, T* panel) {
    uint32_t* to = (uint32_t*)panel;
    for (long t = 0; t < PANEL; t++)
        for (long i = 0; i < dim / PAIR<T>; i++)
            to[i * PANEL + t] = t < count ? read<uint32_t>(keys + at[t] + i * PAIR<T>) : 0;
}

// The values of one token, or of two that make pairs; there may be no second.
inline void interleave(const float* one, const float*, long width, float* to) { std::memcpy(to, one, width * 4); }
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

inline float largest_of(Floats v) {
    float x[LANES];
    std::memcpy(x, &v, sizeof(x));
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] = std::max(x[i], x[i + half]);
    return x[0];
}

struct Row {  // one query on its way through its sequence
    float largest = -INFINITY, total = 0.0f;

    // Scores of 64 tokens, of which it sees `count`, become weights. Returns what earlier sums shrink by.
    template <class T> float weigh(const float* scores, long count, float scale, T* weights) {
        const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Floats seen[VECTORS], most = all(largest);
        for (long v = 0; v < VECTORS; v++) {
            const Floats score = load(scores + v * LANES) * scale;
            seen[v] = pick(lane + (int)(v * LANES) < (int)count, score, all(-INFINITY));
            most = pick(seen[v] > most, seen[v], most);
        }
        const float before = largest;
        largest = largest_of(most);
        const float shrink = before == largest ? 1.0f : exp(all(before - finite(largest)))[0];
        Floats sum_of_weights = {};
        for (long v = 0; v < VECTORS; v++) {
            const Floats weight = exp(seen[v] - finite(largest));
            sum_of_weights += weight;
            store(weights + v * LANES, weight);
        }
        total = total * shrink + sum(sum_of_weights);
        return shrink;
    }
};

// `count` queries from `first` on, of one sequence and one KV head. The last query of the sequence sees all of it.
template <class T>
void attend_to_tile(const T* query, const T* keys, const T* values, const int32_t* table, long context, long first,
                    long count, T* output, const Shape& shape, long kv_head, float scale) {
    const long dim = shape.head_dim, group = shape.heads / shape.kv_heads, rows = count * group;
    const long num_panels = (dim + PANEL - 1) / PANEL, length = context + first + count;
    Room<T> queries(rows * dim), weights(rows * PANEL);
    Room<T> key_panel(PANEL * dim), value_panels(num_panels * PANEL * PANEL);
    Room<float> scores(rows * PANEL), outputs(num_panels * rows * PANEL);  // sums of values: [panels][rows][64]
    std::vector<Row> states(rows);
    for (long r = 0; r < rows; r++) {
        const T* from = query + (first + r / group) * shape.query_stride + (kv_head * group + r % group) * dim;
        std::memcpy((void*)(queries.begin + r * dim), from, dim * sizeof(T));
    }
    for (long token = 0; token < length; token += PANEL) {
        const long num_tokens = std::min(PANEL, length - token);
        long at[PANEL];
        for (long t = 0; t < num_tokens; t++) at[t] = shape.offset_of(table, token + t) + kv_head * dim;
        pack_keys(keys, at, num_tokens, dim, key_panel.begin);
        pack_values(values, at, num_tokens, dim, value_panels.begin);
        std::fill_n(scores.begin, rows * PANEL, 0.0f);
        multiply_all(queries.begin, key_panel.begin, scores.begin, rows, dim);
        for (long r = 0; r < rows; r++) {
            const long seen = std::min(num_tokens, context + first + r / group + 1 - token);
            T* weight = weights.begin + r * PANEL;
            if (seen <= 0) {
                std::fill_n(weight, PANEL, T{});
                continue;
            }
            const float shrink = states[r].weigh(scores.begin + r * PANEL, seen, scale, weight);
            for (long p = 0; shrink != 1.0f && p < num_panels; p++)
                for (long v = 0; v < VECTORS; v++) {
                    float* sums = outputs.begin + (p * rows + r) * PANEL + v * LANES;
                    store(sums, load(sums) * shrink);
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
            store(to + i, sums / states[r].total);
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

// ---------------------------------------------------------------------------------------------------- 4. the rest

constexpr long WORTH_A_THREAD = 1 << 14;  // elements; starting the threads costs as much as a few thousand

// Rows of `heads` heads of `width`; `weight` has a row for every head, or one for all.
template <class T>
void rms_norm(const T* x, const T* weight, T* y, long rows, long heads, long width, long stride, bool weight_per_head,
              float eps, int threads) {
#pragma omp parallel for if (rows * heads * width > WORTH_A_THREAD) num_threads(threads)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const T *from = x + r * stride + h * width, *w = weight + (weight_per_head ? h * width : 0);
            T* to = y + (r * heads + h) * width;
            Floats squares = {};
            for (long i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
            const float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
            for (long i = 0; i < width; i += LANES) store(to + i, load(from + i) * scale * load(w + i));
        }
}

template <class T> void add(const T* x, T* residual, long size) {
    for (long i = 0; i < size; i += LANES) store(residual + i, load(residual + i) + load(x + i));
}

template <class T>
void add_rms_norm(const T* x, T* residual, const T* weight, T* y, long rows, long width, float eps, int threads) {
#pragma omp parallel for if (rows * width > WORTH_A_THREAD) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        add(x + r * width, residual + r * width, width);
        rms_norm(residual + r * width, weight, y + r * width, 1, 1, width, width, false, eps, 1);
    }
}

// In place: pairs (i, i + half) of every head, turned by the angle of their token.
template <class T>
void rotary(T* x, const float* cos, const float* sin, long tokens, long heads, long half, long stride, int threads) {
#pragma omp parallel for if (tokens * heads * half > WORTH_A_THREAD) num_threads(threads)
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
#pragma omp parallel for if (rows * width > WORTH_A_THREAD) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += LANES) {
            const Floats g = load(gate + i);
            store(y + r * width + i, g / (1.0f + exp(-g)) * load(up + i));
        }
    }
}

}  // namespace

// What Python calls: every function for float32 and bfloat16.
#define EXPORTS(T, suffix)                                                                                             \
    void pack_##suffix(const T* weight, T* packed, long in, long out, int threads) {                                   \
        pack(weight, packed, in, out, threads);                                                                        \
    }                                                                                                                  \
    void linear_##suffix(const T* x, const T* packed, const T* bias, T* y, long rows, long in, long out,               \
                         int threads) {                                                                                \
        linear(x, packed, bias, y, rows, in, out, threads);                                                            \
    }                                                                                                                  \
    void attend_##suffix(const T* query, const T* keys, const T* values, const int32_t* tables,                        \
                         const int32_t* lengths, T* output, long num_seqs, long heads, long kv_heads, long head_dim,   \
                         long block_size, long query_stride, long table_stride, float scale, int threads) {            \
        const Shape shape = {num_seqs, heads, kv_heads, head_dim, block_size, query_stride, table_stride};             \
        attend(query, keys, values, tables, lengths, output, shape, scale, threads);                                   \
    }                                                                                                                  \
    void attend_to_prompts_##suffix(const T* query, const T* keys, const T* values, const int32_t* tables,             \
                                    const int32_t* starts, const int32_t* lengths, T* output, long num_seqs,           \
                                    long heads, long kv_heads, long head_dim, long block_size, long query_stride,      \
                                    long table_stride, float scale, int threads) {                                     \
        const Shape shape = {num_seqs, heads, kv_heads, head_dim, block_size, query_stride, table_stride};             \
        attend_to_prompts(query, keys, values, tables, starts, lengths, output, shape, scale, threads);                \
    }                                                                                                                  \
    void store_kv_##suffix(const T* key, const T* value, T* keys, T* values, const int64_t* slots, long tokens,        \
                           long width, long key_stride, long value_stride) {                                           \
        store_kv(key, value, keys, values, slots, tokens, width, key_stride, value_stride);                            \
    }                                                                                                                  \
    void rms_norm_##suffix(const T* x, const T* weight, T* y, long rows, long heads, long width, long stride,          \
                           int weight_per_head, float eps, int threads) {                                              \
        rms_norm(x, weight, y, rows, heads, width, stride, weight_per_head, eps, threads);                             \
    }                                                                                                                  \
    void add_rms_norm_##suffix(const T* x, T* residual, const T* weight, T* y, long rows, long width, float eps,       \
                               int threads) {                                                                          \
        add_rms_norm(x, residual, weight, y, rows, width, eps, threads);                                               \
    }                                                                                                                  \
    void rotary_##suffix(T* x, const float* cos, const float* sin, long tokens, long heads, long half, long stride,    \
                         int threads) {                                                                                \
        rotary(x, cos, sin, tokens, heads, half, stride, threads);                                                     \
    }                                                                                                                  \
    void silu_mul_##suffix(const T* gate_up, T* y, long rows, long width, int threads) {                               \
        silu_mul(gate_up, y, rows, width, threads);                                                                    \
    }

extern "C" {
EXPORTS(float, float32)
EXPORTS(bfloat16, bfloat16)
}
