#include "gemm.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

namespace optimus::cpu {
namespace {

struct Engines {
  std::vector<Engine> of_float, of_bfloat16, of_half;  // fastest first, the same names in each
  Engines() {
    const std::vector<Engine> shared = vector_engines();
    const auto with = [&](c10::ScalarType type) {
      std::vector<Engine> found = amx_engines(type);
      found.insert(found.end(), shared.begin(), shared.end());
      return found;
    };
    of_float = with(c10::kFloat);
    of_bfloat16 = with(c10::kBFloat16);
    of_half = with(c10::kHalf);
  }
};

const Engines& engines() {
  static const Engines found;
  return found;
}

std::atomic<size_t> chosen{0};

}  // namespace

int64_t Engine::panel(Side side, int64_t k) const { return round_up(k, depth) * lanes(side) * halves / 2; }

int64_t Engine::size(Side side, int64_t num_lanes, int64_t k) const {
  return (num_lanes + lanes(side) - 1) / lanes(side) * panel(side, k);
}

const Engine& engine(c10::ScalarType type) {
  const Engines& all = engines();
  const auto& found = type == c10::kFloat ? all.of_float : type == c10::kHalf ? all.of_half : all.of_bfloat16;
  return found[chosen];
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Engine& one : engines().of_float) names.emplace_back(one.name);
  return names;
}

void use_instructions(const std::string& name) {
  const std::vector<std::string> names = instruction_sets();
  const auto found = name.empty() ? names.begin() : std::find(names.begin(), names.end(), name);
  std::string present;
  for (const std::string& one : names) present += (present.empty() ? "" : ", ") + one;
  TORCH_CHECK_VALUE(found != names.end(), "instruction set '", name, "' is not there; this processor has ", present);
  chosen = found - names.begin();
}

void multiply(const Engine& engine, const float* a, const float* b, int64_t num_rows, int64_t num_cols, int64_t depth,
              float* c, int64_t ldc, bool accumulate) {
  // Depth is summed in chunks: a panel of B stays in the first-level cache while the rows pass.
  constexpr int64_t kPanelBytes = 24 * 1024;
  const int64_t a_panel = engine.panel(Side::kLeft, depth), b_panel = engine.panel(Side::kRight, depth);
  const int64_t limit = kPanelBytes / (2 * engine.halves * engine.cols), chunks = (depth + limit - 1) / limit;
  const int64_t chunk = round_up((depth + chunks - 1) / chunks, engine.depth);
  alignas(64) float edge[kMostRows * kMostCols];
  if (engine.begin) engine.begin();
  for (int64_t k = 0; k < depth; k += chunk, accumulate = true) {
    const int64_t len = std::min(chunk, depth - k);
    const float* right = b + k * engine.cols * engine.halves / 2;
    for (int64_t col = 0; col < num_cols; col += engine.cols, right += b_panel) {
      const int64_t cols = std::min<int64_t>(engine.cols, num_cols - col);
      const float* left = a + k * engine.rows * engine.halves / 2;
      const int64_t whole = cols == engine.cols ? num_rows / engine.rows : 0;
      if (whole > 0) engine.run(len, whole, left, a_panel, right, c + col, ldc, accumulate);
      left += whole * a_panel;
      for (int64_t row = whole * engine.rows; row < num_rows; row += engine.rows, left += a_panel) {
        const int64_t rows = std::min<int64_t>(engine.rows, num_rows - row);
        float* out = c + row * ldc + col;
        engine.run(len, 1, left, a_panel, right, edge, engine.cols, false);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t n = 0; n < cols; ++n)
            out[r * ldc + n] = (accumulate ? out[r * ldc + n] : 0.0f) + edge[r * engine.cols + n];
      }
    }
  }
  if (engine.end) engine.end();
}

TORCH_LIBRARY_IMPL(optimus, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_sets", [] {
    std::string names;
    for (const std::string& name : instruction_sets()) names += (names.empty() ? "" : ",") + name;
    return names;
  });
  m.impl("cpu_use_instructions", [](std::string name) { use_instructions(name); });
}

}  // namespace optimus::cpu
