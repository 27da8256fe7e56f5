// Products on Intel's matrix unit (AMX), which multiplies bf16 and sums in fp32.
//
// An operand element is a sum of bf16 parts, each the rounding of what the parts before it leave: one part is bf16
// itself, two hold fp16, three all 24 bits of fp32. The product is that of the parts i and j with i + j < parts; what is
// left out is below the rounding of an fp32 product. So fp32 costs six bf16 products, on a unit that does sixteen times
// the work of the vector units. Beyond what fp32 itself does: an infinity becomes NaN, parts below 2^-126 are zero.
#include "gemm.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 11 && !defined(__clang__)
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "transpose.h"

#define OPTIMUS_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,f16c,amx-tile,amx-bf16")))
#define OPTIMUS_INLINE OPTIMUS_AMX inline __attribute__((always_inline))

namespace optimus::cpu {
namespace {

constexpr int kTile = 512;       // bf16 elements of a tile register: 16 rows of 32
constexpr int kLanes = 32;       // of a panel: two tiles
constexpr int kDepth = 32;       // of a tile
typedef int Words __attribute__((vector_size(64), may_alias));

OPTIMUS_INLINE __m512 widened(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// 16 elements in fp32; those outside the mask are zero and not read.
template <typename T>
OPTIMUS_INLINE __m512 load(const T* from, __mmask16 mask) {
  if constexpr (std::is_same_v<T, float>) return _mm512_maskz_loadu_ps(mask, from);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, from);
  if constexpr (std::is_same_v<T, c10::Half>) return _mm512_cvtph_ps(half);
  return widened(half);
}

// Writes the parts of 32 elements, two tiles apart, each of low's beside that of high's. A part that others follow is
// rounded by integer arithmetic, halves away from zero, in two instructions; the third is what is left, at most 8 bits.
template <int parts>
OPTIMUS_INLINE void split(__m512 low, __m512 high, uint16_t* to) {
  const __m512i upper = _mm512_set1_epi32(0xffff0000), half = _mm512_set1_epi32(0x8000);
#pragma GCC unroll 3
  for (int part = 0; part < parts; ++part, to += 2 * kTile) {
    const bool last = part + 1 == parts;
    if (last && parts < 3) {  // something is cut off: to even, and NaN stays
      const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                             21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
      _mm512_store_si512(to, _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
      return;
    }
    __m512i first = _mm512_castps_si512(low), second = _mm512_castps_si512(high);
    if (!last) {
      first = _mm512_add_epi32(first, half);
      second = _mm512_add_epi32(second, half);
    }
    constexpr int kAndOr = 0xea;  // (second & upper) | third
    _mm512_store_si512(to, _mm512_ternarylogic_epi32(second, upper, _mm512_srli_epi32(first, 16), kAndOr));
    low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_and_si512(first, upper)));
    high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(second, upper)));
  }
}

inline __mmask16 first_of_16(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// One tile of every part. whole: the rows are there and so are the columns.
template <typename T, int parts, bool along, bool turn, bool whole>
OPTIMUS_INLINE void split_tile(const T* const* rows, int64_t col, int64_t num_cols, uint16_t* to) {
  const __mmask16 first = whole ? 0xffff : first_of_16(num_cols - col);
  const __mmask16 second = !along || whole ? first : first_of_16(num_cols - col - 16);
  const auto low = [&](int i) OPTIMUS_AMX { return load(rows[i] + col, whole || rows[i] ? first : 0); };
  const auto high = [&](int i) OPTIMUS_AMX {
    const T* row = rows[along ? i : i + 16];
    return load(row + (along ? col + 16 : col), whole || row ? second : 0);
  };
  if constexpr (!turn) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) split<parts>(low(i), high(i), to + i * 32);
  } else {
    Words lows[16], highs[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) lows[i] = (Words)low(i);
    transpose_16x16(lows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) highs[i] = (Words)high(i);
    transpose_16x16(highs);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) split<parts>((__m512)lows[i], (__m512)highs[i], to + i * 32);
  }
}

// dst: [panel][depth / 32][part][2 tiles][16][32]. A tile of the left operand holds 16 rows with 32 k each, one of the
// right operand 32 k with 16 columns each, k and k + 16 side by side in both. As read, the other needs a transpose.
template <typename T, int parts, bool along, bool turn>
OPTIMUS_AMX void pack_tiles(const Source& source, int64_t lanes, int64_t depth, float* dst) {
  const int64_t num_rows = along ? lanes : depth, num_cols = along ? depth : lanes;
  const int64_t row_step = along ? 16 : kDepth, col_step = along ? kDepth : 16;
  const int64_t row_end = round_up(num_rows, 32), col_end = round_up(num_cols, 32);
  thread_local std::vector<const T*> row_buffer;
  row_buffer.resize(row_end);
  const T** rows = row_buffer.data();
  for (int64_t r = 0; r < row_end; ++r) rows[r] = r < num_rows ? source.row<T>(r) : nullptr;
  const int64_t panel = round_up(depth, kDepth) * kLanes * parts;
  auto* out = reinterpret_cast<uint16_t*>(dst);
  for (int64_t row = 0; row < row_end; row += row_step) {
    for (int64_t r = row + row_step; source.slots && r < std::min(row + 2 * row_step, num_rows); ++r)
      for (int64_t col = 0; col < num_cols; col += 64 / sizeof(T)) __builtin_prefetch(rows[r] + col);
    for (int64_t col = 0; col < col_end; col += col_step) {
      const int64_t lane = along ? row : col, k = along ? col : row;
      uint16_t* tile = out + lane / kLanes * panel + k * kLanes * parts + lane % kLanes / 16 * kTile;
      if (row + row_step <= num_rows && col + col_step <= num_cols)
        split_tile<T, parts, along, turn, true>(rows + row, col, num_cols, tile);
      else
        split_tile<T, parts, along, turn, false>(rows + row, col, num_cols, tile);
    }
  }
}

template <int parts>
void pack(const Source& source, Depth along, Side side, int64_t lanes, int64_t depth, float* dst) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    if (along == Depth::kContiguous)
      (side == Side::kLeft ? pack_tiles<T, parts, true, false> : pack_tiles<T, parts, true, true>)(source, lanes, depth,
                                                                                                   dst);
    else
      (side == Side::kLeft ? pack_tiles<T, parts, false, true> : pack_tiles<T, parts, false, false>)(source, lanes,
                                                                                                     depth, dst);
  };
  with_type(source, run);
}

// 32 x 32 of C in tiles 0 to 3; tiles 4, 5 hold a part of A, 6, 7 one of B.
#define OPTIMUS_LOAD_A(part)                    \
  _tile_loadd(4, a + (part) * 2 * kTile, 64);   \
  _tile_loadd(5, a + (part) * 2 * kTile + kTile, 64)
#define OPTIMUS_LOAD_B(part)                    \
  _tile_loadd(6, b + (part) * 2 * kTile, 64);   \
  _tile_loadd(7, b + (part) * 2 * kTile + kTile, 64)
#define OPTIMUS_PRODUCTS   \
  _tile_dpbf16ps(0, 4, 6); \
  _tile_dpbf16ps(1, 4, 7); \
  _tile_dpbf16ps(2, 5, 6); \
  _tile_dpbf16ps(3, 5, 7)

#define OPTIMUS_BEGIN(tile, to)              \
  if (accumulate)                            \
    _tile_loadd(tile, to, stride);           \
  else                                       \
    _tile_zero(tile)

// The first operands of a tile of C are loaded before the tile above it is stored, so that products go on meanwhile.
template <int parts>
OPTIMUS_AMX void run(int64_t depth, int64_t count, const float* a_panel, int64_t a_step, const float* b_panel, float* c,
                     int64_t ldc, bool accumulate) {
  constexpr int kFirst = parts == 3 ? 2 : 0;  // part of A that is multiplied first
  const auto *a = reinterpret_cast<const uint16_t*>(a_panel), *b = reinterpret_cast<const uint16_t*>(b_panel);
  const int64_t stride = ldc * sizeof(float);
  float* below = c + 16 * ldc;
  OPTIMUS_BEGIN(0, c);
  OPTIMUS_BEGIN(1, c + 16);
  OPTIMUS_BEGIN(2, below);
  OPTIMUS_BEGIN(3, below + 16);
  OPTIMUS_LOAD_A(kFirst);
  OPTIMUS_LOAD_B(0);
  while (true) {
    for (int64_t k = kDepth;; k += kDepth) {
      // An order in which each pair of tiles differs from the one before in one operand: half the loads are saved.
      OPTIMUS_PRODUCTS;
      if constexpr (parts == 3) {
        OPTIMUS_LOAD_A(0);
        OPTIMUS_PRODUCTS;
        OPTIMUS_LOAD_B(2);
        OPTIMUS_PRODUCTS;
      }
      if constexpr (parts > 1) {
        OPTIMUS_LOAD_B(1);
        OPTIMUS_PRODUCTS;
        OPTIMUS_LOAD_A(1);
        if constexpr (parts == 3) {
          OPTIMUS_PRODUCTS;
        }
        OPTIMUS_LOAD_B(0);
        OPTIMUS_PRODUCTS;
      }
      if (k >= depth) break;
      a += 2 * kTile * parts;
      b += 2 * kTile * parts;
      OPTIMUS_LOAD_A(kFirst);
      OPTIMUS_LOAD_B(0);
    }
    if (--count == 0) break;
    a_panel += a_step;
    a = reinterpret_cast<const uint16_t*>(a_panel);
    b = reinterpret_cast<const uint16_t*>(b_panel);
    OPTIMUS_LOAD_A(kFirst);
    OPTIMUS_LOAD_B(0);
    float *next = c + 32 * ldc, *next_below = below + 32 * ldc;
    _tile_stored(0, c, stride);
    OPTIMUS_BEGIN(0, next);
    _tile_stored(1, c + 16, stride);
    OPTIMUS_BEGIN(1, next + 16);
    _tile_stored(2, below, stride);
    OPTIMUS_BEGIN(2, next_below);
    _tile_stored(3, below + 16, stride);
    OPTIMUS_BEGIN(3, next_below + 16);
    c = next;
    below = next_below;
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
  _tile_stored(2, below, stride);
  _tile_stored(3, below + 16, stride);
}

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
alignas(64) const TileConfig kConfig;

OPTIMUS_AMX void begin() { _tile_loadconfig(&kConfig); }
OPTIMUS_AMX void end() { _tile_release(); }  // a thread's state stays small when it is switched

// The system gives tile registers to a process that asks; it is refused where system or processor lacks them.
bool available() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool found = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
                            __builtin_cpu_supports("amx-bf16") &&
                            syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return found;
}

}  // namespace

std::vector<Engine> amx_engines(c10::ScalarType type) {
  if (!available()) return {};
  if (type == c10::kFloat) return {{"amx", 32, 32, kDepth, 3, pack<3>, run<3>, begin, end}};
  if (type == c10::kHalf) return {{"amx", 32, 32, kDepth, 2, pack<2>, run<2>, begin, end}};
  return {{"amx", 32, 32, kDepth, 1, pack<1>, run<1>, begin, end}};
}

}  // namespace optimus::cpu
#else
namespace optimus::cpu {
std::vector<Engine> amx_engines(c10::ScalarType) { return {}; }
}  // namespace optimus::cpu
#endif
