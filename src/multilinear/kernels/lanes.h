// Vectors of floats: 16 with AVX-512, 8 with AVX2. And how numbers are kept between matrices.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using I = int64_t;

#ifdef __AVX512F__

using Vector = __m512;
using Mask = __mmask16;
constexpr I LANES = 16;
constexpr int PANEL = 4;  // vectors of outputs that one pass over the inputs sums up

inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
inline Vector fma(Vector x, Vector y, Vector sum) { return _mm512_fmadd_ps(x, y, sum); }
inline float sum_lanes(Vector x) { return _mm512_reduce_add_ps(x); }
inline float first(Vector x) { return _mm512_cvtss_f32(x); }
inline Mask lanes(unsigned bits) { return (Mask)bits; }
inline Vector choose(Vector x, Mask mask, Vector y) { return _mm512_mask_mov_ps(x, mask, y); }

#else

using Vector = __m256;
using Mask = __m256i;
constexpr I LANES = 8;
constexpr int PANEL = 2;

inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline Vector fma(Vector x, Vector y, Vector sum) { return _mm256_fmadd_ps(x, y, sum); }
inline float first(Vector x) { return _mm256_cvtss_f32(x); }
inline float sum_lanes(Vector x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Mask lanes(unsigned bits) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), each), each);
}
inline Vector choose(Vector x, Mask mask, Vector y) {
    return _mm256_blendv_ps(x, y, _mm256_castsi256_ps(mask));
}

#endif

// How numbers are kept between matrices: float, or bfloat16, whose products are summed in pairs. LANES of them are Held
// as they are; `choose` takes those in a mask from another. (Loads and stores with masks are slow on many CPUs.)
struct Full {
    using T = float;
    using Held = Vector;
    static constexpr I PAIR = 1;
    static inline Vector madd(Vector sum, const T* a, const T* w) { return fma(all(*a), load(w), sum); }
    static inline void put(T* to, Vector x) { store(to, x); }
    static inline Held held(const T* from) { return load(from); }
    static inline void keep(T* to, Held x) { store(to, x); }
    static inline Vector wide(Held x) { return x; }
};

#ifdef __AVX512BF16__

inline __m256i choose(__m256i x, Mask mask, __m256i y) { return _mm256_mask_mov_epi16(x, mask, y); }

struct Half {
    using T = uint16_t;
    using Held = __m256i;
    static constexpr I PAIR = 2;
    static inline Vector madd(Vector sum, const T* a, const T* w) {
        int32_t pair;
        std::memcpy(&pair, a, 4);
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(w));
    }
    static inline void put(T* to, Vector x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }
    static inline Held held(const T* from) { return _mm256_loadu_si256((const __m256i*)from); }
    static inline void keep(T* to, Held x) { _mm256_storeu_si256((__m256i*)to, x); }
    static inline Vector wide(Held x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
};

#else

using Half = Full;  // never asked for

#endif

}  // namespace
