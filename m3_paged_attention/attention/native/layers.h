// All layers of a step in one call, or, with experts, all operations between the choices of two routers.
//
// The operations are those that layers.py calls one by one, in its order, on memory that is used again in every step.
// A call from Python takes some microseconds, and a decode step of a small model has dozens of them. Torch chooses
// experts: a call ends with the logits of a router, and the next one begins with the experts of that layer.

#pragma once

#include "attention.h"
#include "experts.h"
#include "int8.h"
#include "linear.h"
#include "pointwise.h"

namespace {

enum class LinearKind { DENSE, INT8 };  // panels of linear.h, of int8.h; NativeLinear has the same numbers

template <class T> struct Linear {
    const void* packed;
    const T* bias;  // or null
    int kind;       // a `LinearKind`
};

template <class T> struct Layer {
    const T *input_norm, *qk_norm, *post_attention_norm;  // qk_norm: a row for every head of Q and K, or null
    Linear<T> qkv, o, gate_up, down, router;  // the router's weight is null without experts
    void *keys, *values;  // [blocks, block_size, kv_heads, head_dim], of `Step::kv_type`; scales behind each block
};

// native_step.py has the same fields in the same order.
template <class T> struct Step {
    // of the model and its KV
    long num_layers, hidden_size, heads, kv_heads, head_dim, intermediate_size, block_size, kv_type;
    long num_experts, top_k, expert_width;
    float eps, scale;
    const T *embedding, *norm;
    const float *cos, *sin;  // [positions, head_dim / 2]
    const Layer<T>* layers;
    // of a step: its tokens, and its rows, of which those with several new tokens come first
    long num_tokens, num_prefill_tokens, num_prefills, num_decodes, table_stride;
    int threads;
    const int64_t *input_ids, *positions, *slots;       // [num_tokens]
    const int32_t *starts, *lengths, *tables;           // [rows + 1], [rows], [rows, table_stride]
    T *output, *work;                                   // [num_tokens, hidden_size]; see `run_layers`
    float* angles;                                      // [2, num_tokens, head_dim / 2]
    // of experts: the layer whose router's choice is next, -1 when a step begins, `num_layers` when it has ended
    long layer;
    T *logits, *of_experts;     // of that router, [num_tokens, num_experts]; see `run_experts`
    const int64_t* experts;     // [num_tokens, top_k]
    const T* expert_weights;    // [num_tokens, top_k]
};

template <class T> void apply(const Linear<T>& layer, const T* x, T* y, long rows, long in, long out, int threads) {
    switch (LinearKind(layer.kind)) {
        case LinearKind::DENSE:
            return linear(x, (const T*)layer.packed, layer.bias, y, rows, in, out, threads);
        case LinearKind::INT8:
            return linear_int8(x, (const int8_t*)layer.packed, layer.bias, y, rows, in, out, threads);
    }
}

template <class T> void apply_experts(const Step<T>& s, const Layer<T>& layer, const T* x, T* y) {
    const auto run = LinearKind(layer.gate_up.kind) == LinearKind::DENSE ? run_experts<T, DenseRows<T>>
                                                                         : run_experts<T, Int8Rows<T>>;
    run(x, s.experts, s.expert_weights, layer.gate_up.packed, layer.down.packed, y, s.of_experts, s.num_tokens,
        s.top_k, s.num_experts, s.hidden_size, s.expert_width, s.threads);
}

template <class T>
void attention_of(const Step<T>& s, const Layer<T>& layer, const T* query, long stride, T* output,
                  SharedPrefixes& shared) {
    const long width = s.heads * s.head_dim;
    if (s.num_prefills) {
        const Shape shape = {s.num_prefills, s.heads, s.kv_heads, s.head_dim, s.block_size, stride, s.table_stride};
        with_type<T>(s.kv_type, layer.keys, layer.values, [&](auto* keys, auto* values) {
            attend_to_prompts(query, keys, values, s.tables, s.starts, s.lengths, output, shape, s.scale, s.threads);
        });
    }
    if (s.num_decodes) {
        const Shape shape = {s.num_decodes, s.heads, s.kv_heads, s.head_dim, s.block_size, stride, s.table_stride};
        const int32_t* tables = s.tables + s.num_prefills * s.table_stride;
        with_type<T>(s.kv_type, layer.keys, layer.values, [&](auto* keys, auto* values) {
            attend(query + s.num_prefill_tokens * stride, keys, values, tables, s.lengths + s.num_prefills,
                   output + s.num_prefill_tokens * width, shape, s.scale, s.threads, shared);
        });
    }
}

template <class T> void run_layers(Step<T>& s) {
    const long rows = s.num_tokens, hidden = s.hidden_size, dim = s.head_dim, half = dim / 2;
    const long qk_heads = s.heads + s.kv_heads, qk = qk_heads * dim, v = s.kv_heads * dim, qkv = qk + v;
    const int threads = s.threads;
    // `work`: the residual, a normed input, the output of a part; Q, K and V; Q and K normed; the MLP's inside
    T *residual = s.work, *x = residual + rows * hidden, *y = x + rows * hidden, *of_qkv = y + rows * hidden;
    T *of_qk = of_qkv + rows * qkv, *attended = of_qk + rows * qk, *gate_up = attended + rows * s.heads * dim;
    T* gated = gate_up + rows * 2 * s.intermediate_size;
    float *cos = s.angles, *sin = cos + rows * half;
    thread_local std::unique_ptr<SharedPrefixes> shared;  // from the first call of a step to its last one
    if (s.layer < 0) {
        const Shape decodes = {s.num_decodes, s.heads, s.kv_heads, dim, s.block_size, 0, s.table_stride};
        shared = std::make_unique<SharedPrefixes>(s.tables + s.num_prefills * s.table_stride,
                                                  s.lengths + s.num_prefills, decodes, threads);
        for (long r = 0; r < rows; r++) {
            std::memcpy((void*)(residual + r * hidden), s.embedding + s.input_ids[r] * hidden, hidden * sizeof(T));
            std::memcpy(cos + r * half, s.cos + s.positions[r] * half, half * sizeof(float));
            std::memcpy(sin + r * half, s.sin + s.positions[r] * half, half * sizeof(float));
        }
    } else
        apply_experts(s, s.layers[s.layer], x, y);
    for (long i = ++s.layer; i < s.num_layers; i = ++s.layer) {
        const Layer<T>& layer = s.layers[i];
        if (i == 0)
            rms_norm(residual, layer.input_norm, x, rows, 1, hidden, hidden, false, s.eps, threads);
        else
            add_rms_norm(y, residual, layer.input_norm, x, rows, hidden, s.eps, threads);
        apply(layer.qkv, x, of_qkv, rows, hidden, qkv, threads);
        T* query = of_qkv;
        long stride = qkv;
        if (layer.qk_norm) {
            rms_norm(of_qkv, layer.qk_norm, of_qk, rows, qk_heads, dim, qkv, true, s.eps, threads);
            query = of_qk, stride = qk;
        }
        rotary(query, cos, sin, rows, qk_heads, half, stride, threads);
        const Shape stored = {0, 0, s.kv_heads, dim, s.block_size, 0, 0};
        with_type<T>(s.kv_type, layer.keys, layer.values, [&](auto* keys, auto* values) {
            store_kv(query + s.heads * dim, of_qkv + qk, keys, values, s.slots, rows, stored, stride, qkv, threads);
        });
        attention_of(s, layer, query, stride, attended, *shared);
        apply(layer.o, attended, y, rows, s.heads * dim, hidden, threads);
        add_rms_norm(y, residual, layer.post_attention_norm, x, rows, hidden, s.eps, threads);
        if (layer.router.packed) return apply(layer.router, x, s.logits, rows, hidden, s.num_experts, threads);
        apply(layer.gate_up, x, gate_up, rows, hidden, 2 * s.intermediate_size, threads);
        silu_mul(gate_up, gated, rows, s.intermediate_size, threads);
        apply(layer.down, gated, y, rows, s.intermediate_size, hidden, threads);
    }
    add_rms_norm(y, residual, s.norm, s.output, rows, hidden, s.eps, threads);
    shared.reset();
}

}  // namespace
