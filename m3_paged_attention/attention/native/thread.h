// A thread that runs one call at a time: launch it, do something else, wait for it.
//
// Both sides look for a change some microseconds long before they sleep, because to wake a sleeper takes as long as a
// small step.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

class StepThread {
  public:
    using Call = void (*)(const void*);
    using Clock = std::chrono::steady_clock;

    StepThread() : thread_([this] { run(); }) {}

    ~StepThread() {
        launch(nullptr, nullptr);
        thread_.join();
    }

    void launch(Call call, const void* argument) {
        wait();
        call_ = call, argument_ = argument;
        set(true);
    }

    // Returns the duration of the last call in seconds.
    double wait() {
        wait_for(false);
        return seconds_;
    }

  private:
    static constexpr auto AWAKE = std::chrono::microseconds(50);

    void run() {
        for (;;) {
            wait_for(true);
            if (!call_) break;
            const auto began = Clock::now();
            call_(argument_);
            seconds_ = std::chrono::duration<double>(Clock::now() - began).count();
            set(false);
        }
    }

    void set(bool is_busy) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_busy_.store(is_busy, std::memory_order_release);
        }
        changed_.notify_all();
    }

    void wait_for(bool is_busy) {
        const auto asleep = Clock::now() + AWAKE;
        while (is_busy_.load(std::memory_order_acquire) != is_busy)
            if (Clock::now() > asleep) {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] { return is_busy_.load(std::memory_order_acquire) == is_busy; });
            }
    }

    Call call_ = nullptr;
    const void* argument_ = nullptr;
    double seconds_ = 0;
    std::atomic<bool> is_busy_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::thread thread_;  // last, so that it starts when the others are there
};

}  // namespace
