// Products of a few rows with a matrix that Python has packed.
#pragma once
#include <algorithm>

#include "lanes.h"

namespace {

struct Linear {
    const void* weight;  // panels of up to PANEL vectors of outputs; in each, inputs (in pairs) by outputs
    const float* bias;
    I vectors, inputs;  // LANES outputs each; 0 vectors for a missing matrix
};

enum Into { SCRATCH, KEPT, STREAM };  // as floats, as between matrices, or added to floats

template <class F, int N, int R>
inline void panel(const typename F::T* x, I ldx, const typename F::T* w, const float* bias, I inputs, Into into,
                  void* out, I ldo, I rows) {
    Vector sum[R][N];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sum[r][n] = load(bias + LANES * n);
    for (I k = 0; k < inputs; k += F::PAIR) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[r][n] = F::madd(sum[r][n], x + r * ldx + k, w + n * LANES * F::PAIR);
        w += N * LANES * F::PAIR;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        if (r >= rows) break;
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            float* wide = (float*)out + r * ldo + LANES * n;
            if (into == KEPT)
                F::put((typename F::T*)out + r * ldo + LANES * n, sum[r][n]);
            else if (into == SCRATCH)
                store(wide, sum[r][n]);
            else
                store(wide, load(wide) + sum[r][n]);
        }
    }
}

template <class F, int N, int R>
inline void panels(const typename F::T* x, I ldx, const typename F::T* w, const float* bias, I inputs, Into into,
                   char* out, I ldo, I rows, I size) {
    for (I r = 0; r < rows; r += R)  // the scratch has rows to spare
        panel<F, N, R>(x + r * ldx, ldx, w, bias, inputs, into, out + r * ldo * size, ldo, rows - r);
}

// out = x W + b on `rows` rows; as many rows at once as the registers hold sums for
template <class F>
void multiply(const typename F::T* x, I ldx, const Linear& by, Into into, void* out, I ldo, I rows) {
    auto w = (const typename F::T*)by.weight;
    const I size = into == KEPT ? sizeof(typename F::T) : sizeof(float);
    for (I v = 0; v < by.vectors; v += PANEL) {
        const float* bias = by.bias + LANES * v;
        char* to = (char*)out + LANES * v * size;
        const I n = std::min<I>(PANEL, by.vectors - v), k = by.inputs;
        if constexpr (PANEL == 4) {
            switch (n) {
                case 4: panels<F, 4, 6>(x, ldx, w, bias, k, into, to, ldo, rows, size); break;
                case 3: panels<F, 3, 8>(x, ldx, w, bias, k, into, to, ldo, rows, size); break;
                case 2: panels<F, 2, 12>(x, ldx, w, bias, k, into, to, ldo, rows, size); break;
                default: panels<F, 1, 12>(x, ldx, w, bias, k, into, to, ldo, rows, size);
            }
        } else if (n == 2) {
            panels<F, 2, 6>(x, ldx, w, bias, k, into, to, ldo, rows, size);
        } else {
            panels<F, 1, 12>(x, ldx, w, bias, k, into, to, ldo, rows, size);
        }
        w += n * LANES * k;
    }
}

}  // namespace
