// The kernels of the `native` backend, which read KV blocks in place.
//
// They are compiled on the machine that runs them (native_library.py), so one source serves all processors. Sums are
// in float32; those of int16 queries and int8 keys are in int32, which is exact. The result of a row never depends on
// the other rows: a request gets bitwise the same numbers alone and in a batch, unless it shares a long prefix with
// others (shared_prefixes.h). Its prefix is then computed as in prompts: sums have another order, in bfloat16 softmax
// weights are rounded, and with int8 KV queries are not rounded to 16 bits.
//
//     vectors.h          load, store, sum, exp
//     amx.h              products of bfloat16 in tiles, where the processor has them
//     linear.h           weights in panels, read once for up to six rows
//     int8.h             the same with weights of eight bits
//     experts.h          the same for the experts that each row has chosen, in one call
//     kv.h               KV in blocks, in any of its types
//     tile.h             attention of many queries that read the same keys and values: those of a prompt
//     shared_prefixes.h  the same for one new token each of several sequences, over their common prefix
//     attention.h        attention of one new token per sequence
//     pointwise.h        norms, rotary, SiLU
//     layers.h           all layers of a step
//     whole_step.h       the likeliest tokens; a step with the newest tokens before it and the next ones behind it
//     thread.h           a thread that runs calls while Python does something else
//     pages.h            copies of KV pages, for that thread

#include "attention.h"
#include "experts.h"
#include "int8.h"
#include "layers.h"
#include "linear.h"
#include "pages.h"
#include "pointwise.h"
#include "thread.h"
#include "whole_step.h"

// The functions that Python calls, each for float32 and bfloat16.
#define EXPORTS(T, suffix)                                                                                             \
    void pack_##suffix(const T* weight, T* packed, long in, long out, int threads) {                                   \
        pack(weight, packed, in, out, threads);                                                                        \
    }                                                                                                                  \
    void linear_##suffix(const T* x, const T* packed, const T* bias, T* y, long rows, long in, long out,               \
                         int threads) {                                                                                \
        linear(x, packed, bias, y, rows, in, out, threads);                                                            \
    }                                                                                                                  \
    void pack_int8_##suffix(const int8_t* values, const float* scales, int8_t* packed, long in, long out,              \
                            int threads) {                                                                             \
        pack(values, scales, packed, in, out, threads);                                                                \
    }                                                                                                                  \
    void linear_int8_##suffix(const T* x, const int8_t* packed, const T* bias, T* y, long rows, long in, long out,      \
                              int threads) {                                                                           \
        linear_int8(x, packed, bias, y, rows, in, out, threads);                                                       \
    }                                                                                                                  \
    void pack_experts_##suffix(const T* weight, T* packed, long in, long features, long parts, long experts,           \
                               int threads) {                                                                          \
        pack_experts(weight, packed, in, features, parts, experts, threads);                                           \
    }                                                                                                                  \
    void pack_experts_int8_##suffix(const int8_t* values, const float* scales, int8_t* packed, long in,                \
                                    long features, long parts, long experts, int threads) {                            \
        pack_experts(values, scales, packed, in, features, parts, experts, threads);                                   \
    }                                                                                                                  \
    void run_experts_##suffix(const T* x, const int64_t* experts, const T* weights, const void* gate_up,               \
                              const void* down, T* y, T* work, int kind, long tokens, long top_k, long num_experts,    \
                              long hidden, long width, int threads) {                                                  \
        const auto run = LinearKind(kind) == LinearKind::DENSE ? run_experts<T, DenseRows<T>>                          \
                                                               : run_experts<T, Int8Rows<T>>;                          \
        run(x, experts, weights, gate_up, down, y, work, tokens, top_k, num_experts, hidden, width, threads);          \
    }                                                                                                                  \
    void attend_##suffix(const T* query, const void* keys, const void* values, const int32_t* tables,                  \
                         const int32_t* lengths, T* output, int type, long num_seqs, long heads, long kv_heads,        \
                         long head_dim, long block_size, long query_stride, long table_stride, float scale,            \
                         int threads) {                                                                                \
        const Shape shape = {num_seqs, heads, kv_heads, head_dim, block_size, query_stride, table_stride};             \
        SharedPrefixes shared(tables, lengths, shape, threads);                                                        \
        with_type<T>(type, keys, values, [&](auto* k, auto* v) {                                                       \
            attend(query, k, v, tables, lengths, output, shape, scale, threads, shared);                               \
        });                                                                                                            \
    }                                                                                                                  \
    void attend_to_prompts_##suffix(const T* query, const void* keys, const void* values, const int32_t* tables,       \
                                    const int32_t* starts, const int32_t* lengths, T* output, int type,                \
                                    long num_seqs, long heads, long kv_heads, long head_dim, long block_size,          \
                                    long query_stride, long table_stride, float scale, int threads) {                  \
        const Shape shape = {num_seqs, heads, kv_heads, head_dim, block_size, query_stride, table_stride};             \
        with_type<T>(type, keys, values, [&](auto* k, auto* v) {                                                       \
            attend_to_prompts(query, k, v, tables, starts, lengths, output, shape, scale, threads);                    \
        });                                                                                                            \
    }                                                                                                                  \
    void store_kv_##suffix(const T* key, const T* value, void* keys, void* values, const int64_t* slots, int type,     \
                           long tokens, long kv_heads, long head_dim, long block_size, long key_stride,                \
                           long value_stride, int threads) {                                                           \
        const Shape shape = {0, 0, kv_heads, head_dim, block_size, 0, 0};                                              \
        with_type<T>(type, keys, values, [&](auto* k, auto* v) {                                                       \
            store_kv(key, value, k, v, slots, tokens, shape, key_stride, value_stride, threads);                       \
        });                                                                                                            \
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
    }                                                                                                                  \
    void best_tokens_##suffix(const T* x, const void* packed, const T* bias, T* logits, int64_t* tokens, int kind,     \
                              long rows, long in, long out, int threads) {                                             \
        best_tokens({packed, bias, kind}, x, logits, tokens, rows, in, out, threads);                                  \
    }                                                                                                                  \
    void run_layers_##suffix(Step<T>* step) { run_layers(*step); }                                                     \
    void run_step_##suffix(WholeStep<T>* step) { run_step(*step); }

extern "C" {
EXPORTS(float, float32)
EXPORTS(bfloat16, bfloat16)
StepThread* thread_start(long depth) { return new StepThread(depth); }
long thread_launch(StepThread* thread, StepThread::Call call, const void* argument) {
    return thread->launch(call, argument);
}
double thread_wait(StepThread* thread, long number) { return thread->wait(number); }
void thread_stop(StepThread* thread) { thread->stop(); }
void copy_pages(void* copy) { copy_pages(*(PageCopy*)copy); }
void wait_for_pages(const PageCopy* copy, long layers) { wait_for_pages(*copy, layers); }
}
