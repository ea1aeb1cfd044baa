// Threads that share the tasks of one call. Whoever is free takes the next task, so a core that the system gave to
// somebody else delays no more than the task it holds; and nobody waits for a thread that has not begun one.
#pragma once
#include <atomic>
#include <climits>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace prelay {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Looks at what others hold, some ten microseconds, before the core is offered to somebody else.
const int PATIENCE = 500;

class Pool {
  public:
    // `threads` counts the caller. `spin_ns`: how long a thread without work looks for some before it sleeps.
    Pool(int threads, int64_t spin_ns) : spin_ns_(spin_ns) {
        for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
    }
    ~Pool() {
        stopping_ = true;
        wake();
        for (auto &helper : helpers_) helper.join();
    }
    int threads() const { return int(helpers_.size()) + 1; }
    // What the thread that has `task` will probably take next; negative: nothing. They go from the last to the first.
    int after(int task) const { return task - threads(); }

    // Do work(0) ... work(count - 1) in any order, and return when all are done.
    template <class Work> void run(int count, const Work &work) {
        if (count <= 0) return;
        if (helpers_.empty() || count == 1) {
            for (int i = 0; i < count; i++) work(i);
            return;
        }
        call_ = [](const void *work, int i) { (*static_cast<const Work *>(work))(i); };
        work_ = &work;
        done_.store(0, std::memory_order_relaxed);
        uint64_t round = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(round << 32 | uint32_t(count), std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) wake();
        take(round);
        // Whoever still holds a task may have lost its core to somebody else: then this one is better given away.
        for (int turns = 0; done_.load(std::memory_order_acquire) != count; turns++)
            turns < PATIENCE ? relax() : void(sched_yield());
    }

  private:
    // The number of a round above, and how many of its tasks nobody has taken below: one word, so that none is taken
    // of a round that is over. `call_` and `work_` are those of the round as long as one of its tasks is not done.
    bool take(uint64_t round) {
        bool any = false;
        uint64_t seen = ticket_.load(std::memory_order_acquire);
        while (seen >> 32 == round && uint32_t(seen)) {
            if (!ticket_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
            call_(work_, int(uint32_t(seen)) - 1);
            done_.fetch_add(1, std::memory_order_release);
            any = true;
            seen = ticket_.load(std::memory_order_acquire);
        }
        return any;
    }
    void help() {
        int64_t idle_since = now_ns();
        while (!stopping_) {
            uint64_t seen = ticket_.load(std::memory_order_acquire);
            if (uint32_t(seen) && take(seen >> 32)) {
                idle_since = now_ns();
                continue;
            }
            for (int i = 0; i < 64; i++) relax();
            if (now_ns() - idle_since > spin_ns_) {
                sleep();
                idle_since = now_ns();
            }
        }
    }
    void sleep() {
        int before = bell_.load(std::memory_order_seq_cst);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        if (!uint32_t(ticket_.load(std::memory_order_seq_cst)) && !stopping_)
            syscall(SYS_futex, reinterpret_cast<int *>(&bell_), FUTEX_WAIT_PRIVATE, before, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    void wake() {
        bell_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, reinterpret_cast<int *>(&bell_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<int> bell_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    void (*call_)(const void *, int) = nullptr;
    const void *work_ = nullptr;
    const int64_t spin_ns_;
    std::vector<std::thread> helpers_;
};

}  // namespace prelay
