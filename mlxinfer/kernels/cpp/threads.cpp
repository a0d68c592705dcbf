#include "threads.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <signal.h>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kernels {
namespace {

// How long a worker looks for the next job before it sleeps: longer than what mlx's own operations take between two
// kernels of one forward. Measured on two cores, a job for a worker that looks costs 0.3 us, for one that sleeps 7 us,
// and the sleeper takes part from some 25 us on. It offers its core to others meanwhile, so that Python can have it.
constexpr auto SPIN = std::chrono::microseconds(100);
constexpr int PIECES_PER_THREAD = 4;
constexpr int SPINS_BEFORE_YIELD = 1000;

struct Job {
  RangeFunction function;
  const void* context;
  int64_t count;
  int64_t piece;
  int pieces;
};

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int cores() {
  if (const char* text = std::getenv("MLXINFER_THREADS")) {
    int wanted = std::atoi(text);
    if (wanted > 0) return wanted < 256 ? wanted : 256;
  }
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  int known = static_cast<int>(std::thread::hardware_concurrency());
  return known > 0 ? known : 1;
}

// Jobs come from Python's process, whose signals are for its own threads.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// One job at a time. A thread first claims a piece and then reads the job: until that piece is done the job can't end,
// so its fields can't change. `unclaimed_` is 0 or less between jobs, and whoever decrements it then gets nothing.
class Pool {
 public:
  explicit Pool(int size) {
    NoSignals inherited_by_workers;
    try {
      for (int i = 1; i < size; i++) std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      // fewer workers, then: the caller of a job takes whatever pieces are left
    }
  }

  // False: the pool has a job, perhaps this very caller's.
  bool run(const Job& job) {
    if (busy_.test_and_set(std::memory_order_acquire)) return false;
    job_ = job;
    done_.store(0, std::memory_order_relaxed);
    unclaimed_.store(job.pieces, std::memory_order_release);
    number_.fetch_add(1, std::memory_order_seq_cst);
    wake(job.pieces - 1);
    take_pieces();
    wait_for(job.pieces);
    busy_.clear(std::memory_order_release);
    return true;
  }

 private:
  void wake(int wanted) {
    // Against the order in work(): either this sees the sleeper, or the sleeper sees the new number.
    const int sleeping = sleeping_.load(std::memory_order_seq_cst);
    if (sleeping > wanted) {
      for (int i = 0; i < wanted; i++) number_.notify_one();
    } else if (sleeping > 0) {
      number_.notify_all();
    }
  }

  void take_pieces() {
    for (;;) {
      const int left = unclaimed_.fetch_sub(1, std::memory_order_acq_rel);
      if (left <= 0) return;
      const int64_t begin = (job_.pieces - left) * job_.piece, end = begin + job_.piece;
      job_.function(job_.context, begin, end < job_.count ? end : job_.count);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  // Whoever has the last piece may have lost its core: to this thread, if it only spun.
  void wait_for(int pieces) {
    for (int turns = 0; done_.load(std::memory_order_acquire) < pieces; turns++) {
      if (turns < SPINS_BEFORE_YIELD) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
  }

  void work() {
    uint32_t seen = 0;
    for (;;) {
      const uint32_t number = next_number(seen);
      if (number == seen) continue;
      seen = number;
      take_pieces();
    }
  }

  // The number of a job after `seen`, or `seen` where a sleep ended without one.
  uint32_t next_number(uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + SPIN;
    do {
      for (int i = 0; i < 32; i++) {
        const uint32_t number = number_.load(std::memory_order_acquire);
        if (number != seen) return number;
        relax();
      }
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < until);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    number_.wait(seen, std::memory_order_seq_cst);
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    return number_.load(std::memory_order_acquire);
  }

  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  Job job_{};
  alignas(64) std::atomic<uint32_t> number_{0};
  std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<int> unclaimed_{0};
  alignas(64) std::atomic<int> done_{0};
};

}  // namespace

int threads() {
  static const int count = cores();
  return count;
}

void run_in_parallel(RangeFunction function, const void* context, int64_t count, int64_t grain) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  const int64_t grains = 1 + (count - 1) / grain;
  if (grains > 1 && threads() > 1) {
    // Never destroyed: its threads may still look at it while the process ends.
    static Pool* pool = new Pool(threads());
    const int64_t shares = static_cast<int64_t>(threads()) * PIECES_PER_THREAD;
    const int64_t piece = (grains + shares - 1) / shares * grain;
    if (pool->run({function, context, count, piece, static_cast<int>(1 + (count - 1) / piece)})) return;
  }
  function(context, 0, count);
}

}  // namespace kernels
