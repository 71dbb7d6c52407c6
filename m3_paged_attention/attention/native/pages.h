// Copies of KV pages between two memories, for m4's host memory: a call of a thread that needs no Python.

#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace {

struct LayerPair {  // of one layer: K, and V `stride` bytes behind it
    const char* source;
    char* target;
    long source_stride, target_stride, page_bytes;
};

struct PageRun {  // pages side by side in both memories
    int64_t first, into, count;
};

struct PageCopy {  // m4's native_copies.py has the same fields
    const LayerPair* layers;
    const PageRun* runs;
    long num_layers, num_runs, done;  // done: layers
    double seconds;
};

void copy_pages(PageCopy& copy) {
    using Clock = std::chrono::steady_clock;
    const auto began = Clock::now();
    for (long i = 0, end = copy.num_layers; i < end; i++) {  // after the last `done` the host may free `copy`
        const LayerPair& layer = copy.layers[i];
        for (long plane = 0; plane < 2; plane++)
            for (const PageRun* run = copy.runs; run < copy.runs + copy.num_runs; run++)
                memcpy(layer.target + plane * layer.target_stride + run->into * layer.page_bytes,
                       layer.source + plane * layer.source_stride + run->first * layer.page_bytes,
                       run->count * layer.page_bytes);
        copy.seconds = std::chrono::duration<double>(Clock::now() - began).count();
        __atomic_store_n(&copy.done, i + 1, __ATOMIC_RELEASE);
    }
}

void wait_for_pages(const PageCopy& copy, long layers) {
    while (__atomic_load_n(&copy.done, __ATOMIC_ACQUIRE) < layers)
        std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace
