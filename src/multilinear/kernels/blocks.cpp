// Poly-Blocks on a CPU with AVX-512 or AVX2: everything between a block's input and its output stays in the cache.
//
// The spatial shift is the only step in which tokens meet. So one pass over tiles of tokens does, for each tile: gather
// the shifted [A|D]x of the first Mu-Layer, B, norms, product, C, the whole second Mu-Layer, and [A|D]x of the next
// block, which is kept for the next pass. Each thread takes few images at a time through all blocks, so that this stays in
// its cache too, and no thread waits for another; all together take what is left, tile by tile.
// Python has folded the affine maps of all norms and packed the weights.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "multiply.h"

namespace {

inline I round_up(I n, I to) { return (n + to - 1) / to * to; }

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

// a stretch of the vector at a channel that moves one way
struct Piece { I quarter, channel; Mask mask; };

// vector by vector; the first piece of each is taken whole
std::vector<Piece> pieces(I channels) {
    std::vector<Piece> found;
    for (I c = 0; c < channels; c += LANES)
        for (I q = 0; q < 4; q++) {
            // the last one takes the padding along, which is zero everywhere
            const I begin = channels * q / 4, end = q < 3 ? channels * (q + 1) / 4 : round_up(channels, LANES);
            const I low = std::max(begin - c, I(0)), high = std::min(end - c, LANES);
            if (high > low) found.push_back({q, c, lanes((1u << high) - (1u << low))});
        }
    return found;
}

struct Shape { I batch, height, width, dim; };

// Call `put(channel, LANES of them)` for a row whose four quarters come from elsewhere.
template <class F, class Put>
inline void gather(const std::vector<Piece>& pieces, const typename F::T* const from[4], Put put) {
    for (size_t i = 0; i < pieces.size();) {
        const I channel = pieces[i].channel;
        auto held = F::held(from[pieces[i].quarter] + channel);
        for (i++; i < pieces.size() && pieces[i].channel == channel; i++)
            held = choose(held, pieces[i].mask, F::held(from[pieces[i].quarter] + channel));
        put(channel, held);
    }
}

// where a token is in its image
struct Place {
    I row, column;
    Place(const Shape& shape, I t) : row(t / shape.width % shape.height), column(t % shape.width) {}
    void next(const Shape& shape) {
        if (++column < shape.width) return;
        column = 0;
        if (++row == shape.height) row = 0;
    }
};

// where the four quarters of the token in that place come from
template <class T>
inline void neighbours(const Shape& shape, const Place& at, I border, const T* own, I kept, const T* nothing,
                       const T* out[4]) {
    const T* missing = border == 2 ? nothing : own;
    out[0] = at.row > 0 ? own - shape.width * kept : missing;
    out[1] = at.row + 1 < shape.height ? own + shape.width * kept : missing;
    out[2] = at.column > 0 ? own - kept : missing;
    out[3] = at.column + 1 < shape.width ? own + kept : missing;
}

// how memory is shared out: first the rows of [A|D]x that are kept from pass to pass, then the tokens' residual stream,
// then `each` bytes for each thread
struct Plan {
    I tokens, kept, wide1, low1, wide, low, spare, each, stream, start;
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
        stream = round_up((2 * tokens + 1) * kept * size, 64);
        start = round_up(stream + tokens * shape.dim * sizeof(float), 64);
    }
};

// numbers outside, of 32 bits or as between matrices
struct Numbers { char* start; bool wide; };

template <class F>
inline void take(const Numbers& from, I start, float* to, I count) {
    using T = typename F::T;
    if (from.wide)
        std::memcpy(to, (const float*)from.start + start, count * sizeof(float));
    else
        for (I c = 0; c < count; c += LANES) store(to + c, F::wide(F::held((const T*)from.start + start + c)));
}

template <class F>
inline void give(const float* from, const Numbers& to, I start, I count) {
    using T = typename F::T;
    if (to.wide)
        std::memcpy((float*)to.start + start, from, count * sizeof(float));
    else
        for (I c = 0; c < count; c += LANES) F::put((T*)to.start + start + c, load(from + c));
}

template <class F>
void run(const Numbers& in, const Numbers& out, const Shape& shape, const std::vector<Block>& blocks, float eps,
         bool norm, I shift_a, I shift_d, char* memory, I tile, I threads) {
    using T = typename F::T;
    const Plan plan(blocks, shape, tile, sizeof(T));
    const I tokens = plan.tokens, dim = shape.dim, wide1 = plan.wide1, low1 = plan.low1, kept = plan.kept;
    T* before = (T*)memory;  // rows of [A|D]x of this block, and of the next
    T* after = before + tokens * kept;
    T* nothing = after + tokens * kept;
    float* x = (float*)(memory + plan.stream);
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
        for (I t = 0; t < tokens; t += tile) {
            const I rows = std::min(tile, tokens - t);
            take<F>(in, t * dim, x + t * dim, rows * dim);
            lead(blocks[0].mu[0], t, rows, normed, before);
        }
        for (size_t b = 0; b < blocks.size(); b++) {
            const Mu &first = blocks[b].mu[0], &second = blocks[b].mu[1];
            const T* u = b % 2 ? after : before;
            T* next = b % 2 ? before : after;
#pragma omp for schedule(dynamic)
            for (I t = 0; t < tokens; t += tile) {
                const I rows = std::min(tile, tokens - t);
                Place at(shape, t);
                for (I r = 0; r < rows; r++, at.next(shape)) {
                    const T *near[4], *own[4];
                    std::fill_n(own, 4, u + (t + r) * kept);
                    neighbours(shape, at, border, own[0], kept, nothing, near);
                    gather<F>(pieces_a, shift_a ? near : own,
                              [&](I c, auto x) { store(f + r * wide1 + c, F::wide(x)); });
                    for (auto& from : own) from += wide1;
                    for (auto& from : near) from += wide1;
                    gather<F>(pieces_d, shift_d ? near : own, [&](I c, auto x) { F::keep(lows + r * low1 + c, x); });
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
                if (b + 1 < blocks.size())
                    lead(blocks[b + 1].mu[0], t, rows, normed, next);
                else
                    give<F>(here, out, t * dim, rows * dim);
            }
        }
    }
}

}  // namespace

// Blocks on x (batch, height, width, dim). Of the first `alone` images each thread takes `images` at a time by itself, and
// all together take the others. `half` says that they keep bfloat16 between matrices, and `narrow` which of x (1) and out
// (2) are so too. A shift is 0 for none, 1 for a border that keeps, 2 for zeros. Without `memory` this only says how many
// bytes of it are needed.
extern "C" int64_t multilinear_blocks(char* x, char* out, int64_t narrow, const int64_t* sizes, const char* weights,
                                      const int64_t* table, int64_t depth, float eps, int64_t norm, int64_t shift_a,
                                      int64_t shift_d, int64_t half, char* memory, int64_t alone, int64_t images,
                                      int64_t tile, int64_t threads) {
    std::vector<Block> blocks(depth);
    for (Block& block : blocks)
        for (Mu& mu : block.mu) mu = read_mu(weights, table);
    const I size = half ? sizeof(Half::T) : sizeof(Full::T), image = sizes[1] * sizes[2] * sizes[3];
    auto needs = [&](I batch, I team) {
        const Plan plan(blocks, {batch, sizes[1], sizes[2], sizes[3]}, tile, size);
        return plan.start + team * plan.each;
    };
    auto part = [&](char* all, bool wide, I start) {
        return Numbers{all + start * image * (wide ? (I)sizeof(float) : size), wide};
    };
    auto pass = [&](I start, I batch, char* memory, I team) {
        const I share = (batch * sizes[1] * sizes[2] + team - 1) / team;  // of few tokens each thread takes as many
        (half ? run<Half> : run<Full>)(part(x, !(narrow & 1), start), part(out, !(narrow & 2), start),
                                       {batch, sizes[1], sizes[2], sizes[3]}, blocks, eps, norm, shift_a, shift_d,
                                       memory, std::min(tile, share), team);
    };
    const I each = needs(images, 1), rest = sizes[0] - alone;
    if (memory) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (I start = 0; start < alone; start += images)
            pass(start, std::min(images, alone - start), memory + omp_get_thread_num() * each, 1);
        if (rest > 0) pass(alone, rest, memory, threads);
    }
    return std::max(threads * each, rest > 0 ? needs(rest, threads) : 0);
}
