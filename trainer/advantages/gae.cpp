// Skip-observation GAE and whitening for compiled.py, which calls these functions through ctypes.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

// `returns` may be null. Trajectories are dealt to threads one at a time. True if an observation token carries a reward.
extern "C" bool gae(const float* values, const float* rewards, const bool* action, const int64_t* cu, int64_t rows, double gamma,
                    const double* lam, const double* bootstrap, float* advantages, float* returns, int64_t threads) {
  std::atomic<int64_t> row{0};
  std::atomic<bool> lost{false};
  auto work = [&] {
    for (int64_t b; (b = row++) < rows;) {
      double v = bootstrap[b], a = 0, w = gamma * lam[b];
      for (int64_t t = cu[b + 1]; t-- > cu[b];) {
        if (action[t]) {
          a = rewards[t] + gamma * v - values[t] + w * a;
          v = values[t];
        } else if (rewards[t] != 0) {
          lost = true;
        }
        advantages[t] = action[t] ? a : 0;
        if (returns) returns[t] = action[t] ? a + v : 0;
      }
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; i++) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
  return lost;
}

// Calls f(first, end) for each run of action tokens.
template <class F>
void runs(const bool* action, int64_t n, F f) {
  for (int64_t first, end = 0; end < n; f(first, end)) {
    auto found = static_cast<const bool*>(std::memchr(action + end, 1, n - end));
    if (!found) return;
    first = found - action;
    found = static_cast<const bool*>(std::memchr(found, 0, n - first));
    end = found ? found - action : n;
  }
}

// Number of action tokens, and the sums of x - centre and of its square over them.
extern "C" void moments(const float* x, const bool* action, int64_t n, double centre, double* out) {
  double number = 0, sum = 0, squares = 0;
  runs(action, n, [&](int64_t first, int64_t end) {
    for (int64_t t = first; t < end; t++) {
      double y = x[t] - centre;
      sum += y, squares += y * y;
    }
    number += end - first;
  });
  out[0] = number, out[1] = sum, out[2] = squares;
}

// In place; zero on observation tokens.
extern "C" void standardise(float* x, const bool* action, int64_t n, double mean, double scale) {
  int64_t done = 0;
  runs(action, n, [&](int64_t first, int64_t end) {
    std::fill(x + done, x + first, 0);
    for (int64_t t = first; t < end; t++) x[t] = (x[t] - mean) * scale;
    done = end;
  });
  std::fill(x + done, x + n, 0);
}
