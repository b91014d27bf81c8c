// Threads that work on one call together, lent by XLA's thread pool.
//
// A helper is a task of the pool that stays for the calls of a whole step: it spins for work
// and leaves after a short time without any, so that sharing a call costs no wake-up. The
// caller drains the work itself and waits only for pieces that a helper has begun, never for
// a helper to start: however busy the pool is, a call ends.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Team {
 public:
  static Team& Get() {
    static Team* team = new Team;  // outlives the pool's threads
    return *team;
  }

  // Threads of a call, the caller's included; 0 is as many as the pool has.
  std::atomic<int> limit{0};

  // Takes the team for one call; a call that finds it taken works alone.
  bool TryAcquire() { return !busy_.test_and_set(std::memory_order_acquire); }
  void Release() { busy_.clear(std::memory_order_release); }

  // Calls fn(i) for each i in [0, count); `schedule` puts a task on the pool.
  template <typename Schedule, typename Fn>
  void Run(int threads, int64_t count, const Schedule& schedule, const Fn& fn) {
    call_ = [](const void* f, int64_t i) { (*static_cast<const Fn*>(f))(i); };
    arg_ = &fn;
    done_.store(0, std::memory_order_relaxed);
    state_.store(uint64_t(count) << 32, std::memory_order_release);
    const int wanted = int(count < threads ? count : threads) - 1;
    while (helpers_.load(std::memory_order_relaxed) < wanted) {
      helpers_.fetch_add(1, std::memory_order_relaxed);
      schedule([this] { Help(); });
    }
    while (Work()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) Wait(spins);
  }

 private:
  // As long as the gaps between a step's calls: waking a helper costs about as much.
  static constexpr std::chrono::microseconds kPatience{200};

  // Does one piece; false where none is left.
  bool Work() {
    uint64_t state = state_.load(std::memory_order_acquire);
    if (uint32_t(state) >= state >> 32) return false;
    state = state_.fetch_add(1, std::memory_order_acq_rel);
    const int64_t piece = uint32_t(state);
    if (piece >= int64_t(state >> 32)) return false;
    // A piece that was claimed keeps call_ and arg_ in place until it is done.
    call_(arg_, piece);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void Help() {
    using Clock = std::chrono::steady_clock;
    while (true) {
      const auto idle_since = Clock::now();
      int spins = 0;
      for (; !Work(); ++spins) {
        Pause();
        if (spins % 64 == 63 && Clock::now() - idle_since > kPatience) {
          helpers_.fetch_sub(1, std::memory_order_relaxed);
          return;
        }
      }
    }
  }

  static void Pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static void Wait(int spins) {
    if (spins % 1024 == 1023) std::this_thread::yield();  // the helper may have lost its core
    else Pause();
  }

  alignas(64) std::atomic<uint64_t> state_{0};  // pieces << 32 | next piece
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> helpers_{0};
  void (*call_)(const void*, int64_t) = nullptr;
  const void* arg_ = nullptr;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};
