// A thread that runs calls (steps, copies), one after the other: launch some of them, do something else, wait for the first.
//
// Both sides spin for 50 microseconds before they sleep, because waking a thread takes as long as a small step.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

class StepThread {
  public:
    using Call = void (*)(const void*);
    using Clock = std::chrono::steady_clock;

    // `depth`: number of calls that may be launched and not have ended.
    explicit StepThread(long depth) : tasks_(depth), thread_([this] { run(); }) {}

    // Ends the thread. The object stays: another thread may be in a call of it, for example when Python ends.
    void stop() {
        launch(nullptr, nullptr);
        thread_.join();
    }

    // Returns the number of the call. Waits while there are `depth` others. Does nothing after `stop`.
    long launch(Call call, const void* argument) {
        std::lock_guard<std::mutex> lock(launch_);
        const long number = launched_.load(std::memory_order_relaxed) + 1;
        if (has_ended_) return number - 1;
        has_ended_ = !call;
        wait_for(done_, number - depth());
        tasks_[number % depth()] = {call, argument, 0};
        set(launched_, number);
        return number;
    }

    // Waits until a call has ended; 0: all. Returns its duration in seconds, if it is one of the last `depth`.
    double wait(long number) {
        if (!number) number = launched_.load(std::memory_order_relaxed);
        wait_for(done_, number);
        return tasks_[number % depth()].seconds;
    }

  private:
    struct Task {
        Call call;
        const void* argument;
        double seconds;
    };

    static constexpr auto AWAKE = std::chrono::microseconds(50);

    long depth() const { return (long)tasks_.size(); }

    void run() {
        for (long number = 1;; number++) {
            wait_for(launched_, number);
            Task& task = tasks_[number % depth()];
            if (!task.call) return set(done_, number);
            const auto began = Clock::now();
            task.call(task.argument);
            task.seconds = std::chrono::duration<double>(Clock::now() - began).count();
            set(done_, number);
        }
    }

    void set(std::atomic<long>& count, long number) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            count.store(number, std::memory_order_release);
        }
        changed_.notify_all();
    }

    void wait_for(const std::atomic<long>& count, long number) {
        const auto asleep = Clock::now() + AWAKE;
        while (count.load(std::memory_order_acquire) < number)
            if (Clock::now() > asleep) {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] { return count.load(std::memory_order_acquire) >= number; });
            }
    }

    std::vector<Task> tasks_;
    std::atomic<long> launched_{0}, done_{0};
    bool has_ended_ = false;
    std::mutex launch_, mutex_;
    std::condition_variable changed_;
    std::thread thread_;  // last, so that it starts when the others are there
};

}  // namespace
