// A step from its placeholders to its tokens, for a thread whose caller does not know the tokens of the step before.

#pragma once

#include "layers.h"

namespace {

// native_thread.py of m6 has the same fields in the same order.
template <class T> struct WholeStep {
    Step<T> step;
    int64_t *input_ids, *newest;  // of `step`, with placeholders -1 - i for newest[i]; the newest token of each request
    // null without a choice of tokens
    Linear<T> head;
    long vocab_size;
    const int64_t* rows;  // [num_tokens]: where in `newest` the next token is stored
    int64_t* tokens;      // [num_tokens]: the next ones; -1 where logits are not finite
    T* logits;            // [num_tokens, vocab_size]
};

// The first of the largest values; -1 if any is not finite.
template <class T> int64_t best_of(const T* logits, long size) {
    Floats largest = all(-INFINITY), zeros = {};
    float best = -INFINITY, zero = 0;
    long i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats values = load(logits + i);
        largest = larger(values, largest);
        zeros += values * 0.0f;  // NaN for what is not finite
    }
    for (; i < size; i++) {
        best = std::max(best, load_one(logits + i));
        zero += load_one(logits + i) * 0.0f;
    }
    if (std::isnan(sum(zeros) + zero)) return -1;
    for (int lane = 0; lane < LANES; lane++) best = std::max(best, largest[lane]);
    for (i = 0; load_one(logits + i) != best;) i++;
    return i;
}

// tokens [rows]: of the largest of the logits x [rows][in] * head, [rows][out]; -1 if any is not finite
template <class T>
void best_tokens(const Linear<T>& head, const T* x, T* logits, int64_t* tokens, long rows, long in, long out,
                 int threads) {
    apply(head, x, logits, rows, in, out, threads);
#pragma omp parallel for if (rows > 1) schedule(static) num_threads(threads)
    for (long r = 0; r < rows; r++) tokens[r] = best_of(logits + r * out, out);
}

template <class T> void run_step(WholeStep<T>& s) {
    const long rows = s.step.num_tokens;
    for (long r = 0; r < rows; r++)
        if (s.input_ids[r] < 0) s.input_ids[r] = s.newest[-1 - s.input_ids[r]];
    run_layers(s.step);
    if (!s.tokens) return;
    best_tokens(s.head, s.step.output, s.logits, s.tokens, rows, s.step.hidden_size, s.vocab_size, s.step.threads);
    for (long r = 0; r < rows; r++)
        s.newest[s.rows[r]] = std::max<int64_t>(s.tokens[r], 0);  // any token will do for a request that has ended
}

}  // namespace
