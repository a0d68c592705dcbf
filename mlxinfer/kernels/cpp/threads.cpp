#include "threads.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kernels {
namespace {

// How long a worker looks for the next job before it sleeps. Kernels of one forward follow each other within this.
constexpr auto SPIN = std::chrono::microseconds(30);
constexpr int PIECES_PER_THREAD = 4;

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

// One job at a time. `ticket` holds the job's number in its upper and the next piece in its lower half, so that a
// worker that comes late can't take a piece of another job than the one whose fields it has read.
class Pool {
 public:
  explicit Pool(int size) {
    for (int i = 1; i < size; i++) std::thread([this] { work(); }).detach();
  }

  bool run(RangeFunction function, const void* context, int64_t count, int64_t piece) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    piece_.store(piece, std::memory_order_relaxed);
    const uint32_t pieces = static_cast<uint32_t>((count + piece - 1) / piece);
    pieces_.store(pieces, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
    ticket_.store(static_cast<uint64_t>(job) << 32, std::memory_order_release);
    job_.store(job, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) job_.notify_all();
    take_pieces(job);
    while (done_.load(std::memory_order_acquire) < pieces) relax();
    return true;
  }

 private:
  void take_pieces(uint32_t job) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(ticket >> 32) == job) {
      const int64_t index = static_cast<int64_t>(ticket & 0xffffffffu);
      const RangeFunction function = function_.load(std::memory_order_relaxed);
      const void* context = context_.load(std::memory_order_relaxed);
      const int64_t count = count_.load(std::memory_order_relaxed), piece = piece_.load(std::memory_order_relaxed);
      if (index >= pieces_.load(std::memory_order_relaxed)) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      const int64_t begin = index * piece, end = begin + piece;
      function(context, begin, end < count ? end : count);
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work() {
    uint32_t seen = 0;
    for (;;) {
      uint32_t job = job_.load(std::memory_order_acquire);
      if (job == seen) {
        const auto until = std::chrono::steady_clock::now() + SPIN;
        do {
          for (int i = 0; i < 32 && job == seen; i++) {
            relax();
            job = job_.load(std::memory_order_acquire);
          }
        } while (job == seen && std::chrono::steady_clock::now() < until);
        if (job == seen) {
          sleeping_.fetch_add(1, std::memory_order_seq_cst);
          job_.wait(seen, std::memory_order_seq_cst);
          sleeping_.fetch_sub(1, std::memory_order_seq_cst);
          continue;
        }
      }
      seen = job;
      take_pieces(job);
    }
  }

  std::mutex busy_;
  alignas(64) std::atomic<uint32_t> job_{0};
  std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<RangeFunction> function_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> count_{0}, piece_{1}, pieces_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
};

}  // namespace

int threads() {
  static const int count = cores();
  return count;
}

void run_in_parallel(RangeFunction function, const void* context, int64_t count, int64_t grain) {
  if (count <= 0) return;
  const int64_t grains = (count + grain - 1) / grain;
  if (grains > 1 && threads() > 1) {
    // Never destroyed: its threads may still look at it while the process ends.
    static Pool* pool = new Pool(threads());
    const int64_t shares = static_cast<int64_t>(threads()) * PIECES_PER_THREAD;
    const int64_t piece = (grains + shares - 1) / shares * grain;
    if (pool->run(function, context, count, piece)) return;
  }
  function(context, 0, count);
}

}  // namespace kernels
