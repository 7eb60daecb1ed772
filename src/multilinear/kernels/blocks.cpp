// Poly-Blocks on a CPU with AVX-512 or AVX2: everything between a block's input and its output stays in the cache.
//
// The spatial shift is the only step in which tokens meet. So one pass over tiles of tokens does, for each tile: gather
// the shifted [A|D]x of the first Mu-Layer, B, norms, product, C, the whole second Mu-Layer, and [A|D]x of the next
// block, which is kept for the next pass. Python has folded the affine maps of all norms and packed the weights.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"

namespace {

inline I round_up(I n, I to) { return (n + to - 1) / to * to; }

struct Linear {
    const void* weight;  // panels of up to PANEL vectors of outputs; in each, inputs (in pairs) by outputs
    const float* bias;
    I vectors, inputs;  // LANES outputs each; 0 vectors for a missing matrix
};

struct Mu {
    Linear A, D, B, C;
    const float *scale_a, *shift_a, *scale_b, *shift_b;  // product = (scale_a p + shift_a)(scale_b q + shift_b)
    I hidden, low;
};

struct Block { Mu mu[2]; };

// The table that Python writes: for each Mu-Layer A, D, B, C (weight, bias, vectors, inputs), the four vectors of the
// product, hidden and low; memory as an offset from `base`.
Mu read_mu(const char* base, const I*& entry) {
    Mu mu;
    for (Linear* linear : {&mu.A, &mu.D, &mu.B, &mu.C}) {
        *linear = {base + entry[0], (const float*)(base + entry[1]), entry[2], entry[3]};
        entry += 4;
    }
    for (auto vector : {&mu.scale_a, &mu.shift_a, &mu.scale_b, &mu.shift_b}) *vector = (const float*)(base + *entry++);
    mu.hidden = *entry++;
    mu.low = *entry++;
    return mu;
}

enum Into { SCRATCH, KEPT, STREAM };

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

// One over the deviation of each of R rows about their means. Several rows at once, as each waits for its own sums.
template <int R>
inline void deviations(const float* x, I ldx, I width, I count, float eps, bool centred, Vector* mean, Vector* scale) {
    Vector sum[R], square[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sum[r] = square[r] = mean[r] = all(0);
    if (!centred) {
        for (I c = 0; c < width; c += LANES)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sum[r] = sum[r] + load(x + r * ldx + c);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) mean[r] = all(sum_lanes(sum[r]) / count);
    }
    for (I c = 0; c < width; c += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const Vector d = load(x + r * ldx + c) - mean[r];
            square[r] = fma(d, d, square[r]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        // the padding is zero, and so as far from the mean as the mean is from zero
        const float m = first(mean[r]), total = sum_lanes(square[r]) - (width - count) * m * m;
        scale[r] = all(1 / __builtin_sqrtf(total / count + eps));
    }
}

// layer norm without its affine map, or a mere change of type
template <class F, int R>
inline void normalise_rows(const float* x, I dim, float eps, bool norm, typename F::T* out) {
    Vector mean[R], scale[R];
    if (norm) deviations<R>(x, dim, dim, dim, eps, false, mean, scale);
    for (I c = 0; c < dim; c += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            Vector v = load(x + r * dim + c);
            F::put(out + r * dim + c, norm ? (v - mean[r]) * scale[r] : v);
        }
}

template <class F>
void normalise(const float* x, I dim, float eps, bool norm, typename F::T* out, I rows) {
    I r = 0;
    for (; r + 4 <= rows; r += 4) normalise_rows<F, 4>(x + r * dim, dim, eps, norm, out + r * dim);
    for (; r < rows; r++) normalise_rows<F, 1>(x + r * dim, dim, eps, norm, out + r * dim);
}

// both norms and the product; `centred` weights have made the means zero, B's always
template <class F, int R>
inline void product_rows(const float* f, const float* s, const Mu& mu, I width, float eps, bool norm, bool centred,
                         typename F::T* out) {
    Vector mean[R], none[R], scale_f[R], scale_s[R];
    if (norm) {
        deviations<R>(f, width, width, mu.hidden, eps, centred, mean, scale_f);
        deviations<R>(s, width, width, mu.hidden, eps, true, none, scale_s);
    }
    for (I c = 0; c < width; c += LANES) {
        const Vector scale_a = load(mu.scale_a + c), shift_a = load(mu.shift_a + c);
        const Vector scale_b = load(mu.scale_b + c), shift_b = load(mu.shift_b + c);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            Vector p = load(f + r * width + c), q = load(s + r * width + c);
            if (norm) {
                p = (p - mean[r]) * scale_f[r];
                q = q * scale_s[r];
            }
            p = fma(p, scale_a, shift_a);
            F::put(out + r * width + c, p * fma(q, scale_b, shift_b));
        }
    }
}

template <class F>
void product(const float* f, const float* s, const Mu& mu, I width, float eps, bool norm, bool centred,
             typename F::T* out, I rows) {
    I r = 0;
    for (; r + 4 <= rows; r += 4)
        product_rows<F, 4>(f + r * width, s + r * width, mu, width, eps, norm, centred, out + r * width);
    for (; r < rows; r++)
        product_rows<F, 1>(f + r * width, s + r * width, mu, width, eps, norm, centred, out + r * width);
}

// a stretch of one vector of channels that moves one way
struct Piece { I quarter, channel; Mask mask; };

std::vector<Piece> pieces(I channels) {
    std::vector<Piece> found;
    for (I q = 0; q < 4; q++) {
        // the last one takes the padding along, which is zero everywhere
        const I begin = channels * q / 4, end = q < 3 ? channels * (q + 1) / 4 : round_up(channels, LANES);
        for (I c = begin / LANES * LANES; c < end; c += LANES) {
            const I low = std::max(begin - c, I(0)), high = std::min(end - c, LANES);
            if (high > low) found.push_back({q, c, lanes((1u << high) - (1u << low))});
        }
    }
    return found;
}

struct Shape { I batch, height, width, dim; };

// where the four quarters of token t come from
template <class T>
inline void neighbours(const Shape& shape, I t, I border, const T* u, I kept, const T* nothing, const T* out[4]) {
    const I column = t % shape.width, row = t / shape.width % shape.height;
    const T *own = u + t * kept, *missing = border == 2 ? nothing : own;
    out[0] = row > 0 ? own - shape.width * kept : missing;
    out[1] = row + 1 < shape.height ? own + shape.width * kept : missing;
    out[2] = column > 0 ? own - kept : missing;
    out[3] = column + 1 < shape.width ? own + kept : missing;
}

// how memory is shared out: first the rows of [A|D]x that are kept from pass to pass, then `each` bytes for each thread
struct Plan {
    I tokens, kept, wide1, low1, wide, low, spare, each, start;
    Plan(const std::vector<Block>& blocks, const Shape& shape, I tile, I size) {
        const Mu &first = blocks[0].mu[0], &second = blocks[0].mu[1];  // all blocks have the same sizes
        tokens = shape.batch * shape.height * shape.width;
        wide1 = first.A.vectors * LANES;
        low1 = round_up(first.low, LANES);
        kept = wide1 + low1;
        wide = std::max(wide1, second.A.vectors * LANES);
        low = std::max(low1, round_up(second.low, LANES));
        spare = tile + 12;  // rows are multiplied up to 12 at a time
        each = round_up(spare * (2 * wide * sizeof(float) + (wide + shape.dim + low) * size), 64);
        start = round_up((2 * tokens + 1) * kept * size, 64);
    }
};

template <class F>
void run(float* x, const Shape& shape, const std::vector<Block>& blocks, float eps, bool norm, I shift_a, I shift_d,
         char* memory, I tile, I threads) {
    using T = typename F::T;
    const Plan plan(blocks, shape, tile, sizeof(T));
    const I tokens = plan.tokens, dim = shape.dim, wide1 = plan.wide1, low1 = plan.low1, kept = plan.kept;
    T* before = (T*)memory;  // rows of [A|D]x of this block, and of the next
    T* after = before + tokens * kept;
    T* nothing = after + tokens * kept;
    std::memset(nothing, 0, kept * sizeof(T));
    auto lead = [&](const Mu& mu, I t, I rows, T* normed, T* to) {
        normalise<F>(x + t * dim, dim, eps, norm, normed, rows);
        multiply<F>(normed, dim, mu.A, KEPT, to + t * kept, kept, rows);
        if (mu.D.vectors)
            multiply<F>(normed, dim, mu.D, KEPT, to + t * kept + wide1, kept, rows);
        else
            for (I r = 0; r < rows; r++) std::memcpy(to + (t + r) * kept + wide1, normed + r * dim, dim * sizeof(T));
    };
    const I border = std::max(shift_a, shift_d);
    const auto pieces_a = pieces(blocks[0].mu[0].hidden), pieces_d = pieces(blocks[0].mu[0].low);
#pragma omp parallel num_threads(threads)
    {
        float* f = (float*)(memory + plan.start + omp_get_thread_num() * plan.each);
        float* s = f + plan.spare * plan.wide;
        T* p = (T*)(s + plan.spare * plan.wide);
        T* normed = p + plan.spare * plan.wide;
        T* lows = normed + plan.spare * dim;
        std::memset(f, 0, plan.each);  // rows to spare are computed and dropped: no slow numbers in them
#pragma omp for schedule(dynamic)
        for (I t = 0; t < tokens; t += tile) lead(blocks[0].mu[0], t, std::min(tile, tokens - t), normed, before);
        for (size_t b = 0; b < blocks.size(); b++) {
            const Mu &first = blocks[b].mu[0], &second = blocks[b].mu[1];
            const T* u = b % 2 ? after : before;
            T* next = b % 2 ? before : after;
#pragma omp for schedule(dynamic)
            for (I t = 0; t < tokens; t += tile) {
                const I rows = std::min(tile, tokens - t);
                for (I r = 0; r < rows; r++) {
                    const T *near[4], *own[4];
                    neighbours(shape, t + r, border, u, kept, nothing, near);
                    std::fill_n(own, 4, u + (t + r) * kept);
                    for (const Piece& piece : pieces_a)
                        F::widen(f + r * wide1 + piece.channel, piece.mask,
                                 (shift_a ? near : own)[piece.quarter] + piece.channel);
                    for (const Piece& piece : pieces_d)
                        F::move(lows + r * low1 + piece.channel, piece.mask,
                                (shift_d ? near : own)[piece.quarter] + wide1 + piece.channel);
                }
                float* here = x + t * dim;
                multiply<F>(lows, low1, first.B, SCRATCH, s, wide1, rows);
                product<F>(f, s, first, wide1, eps, norm, !shift_a, p, rows);
                multiply<F>(p, wide1, first.C, STREAM, here, dim, rows);
                const I wide2 = second.A.vectors * LANES, low2 = round_up(second.low, LANES);
                normalise<F>(here, dim, eps, norm, normed, rows);
                multiply<F>(normed, dim, second.A, SCRATCH, f, wide2, rows);
                const bool narrow = second.D.vectors;
                if (narrow) multiply<F>(normed, dim, second.D, KEPT, lows, low2, rows);
                multiply<F>(narrow ? lows : normed, narrow ? low2 : dim, second.B, SCRATCH, s, wide2, rows);
                product<F>(f, s, second, wide2, eps, norm, true, p, rows);
                multiply<F>(p, wide2, second.C, STREAM, here, dim, rows);
                if (b + 1 < blocks.size()) lead(blocks[b + 1].mu[0], t, rows, normed, next);
            }
        }
    }
}

}  // namespace

// Blocks in place on x (batch, height, width, dim). A shift is 0 for none, 1 for a border that keeps, 2 for zeros.
// Without `memory` this only says how many bytes of it are needed.
extern "C" int64_t multilinear_blocks(float* x, const int64_t* sizes, const char* weights, const int64_t* table,
                                      int64_t depth, float eps, int64_t norm, int64_t shift_a, int64_t shift_d,
                                      int64_t half, char* memory, int64_t tile, int64_t threads) {
    const Shape shape{sizes[0], sizes[1], sizes[2], sizes[3]};
    std::vector<Block> blocks(depth);
    for (Block& block : blocks)
        for (Mu& mu : block.mu) mu = read_mu(weights, table);
    const Plan plan(blocks, shape, tile, half ? sizeof(Half::T) : sizeof(Full::T));
    if (memory)
        (half ? run<Half> : run<Full>)(x, shape, blocks, eps, norm, shift_a, shift_d, memory, tile, threads);
    return plan.start + threads * plan.each;
}
