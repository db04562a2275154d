// Paged attention, rope with KV write, norm, gated activations and keyed noise on a CPU, behind a plain C interface.
//
// The kernels stand once, in the lower half, written in terms of a vector of W floats. The upper half includes this
// file again once per instruction set (BG_LEVEL) with the compiler's target switched, collects each set of kernels
// in a table, and exports functions that take the level as an argument, so that one binary serves every machine.
// Nothing here knows Python or torch: pointers, sizes and strides (in elements) come in, checked by the caller.
//
// The KV pool. A block holds block_size tokens; for one block and one KV head the keys come first, then the values,
// both as rows of 4-byte lanes (padded_dim = head_dim rounded up to 16, the padding zero):
//
//   bfloat16   K [head_dim / 2][block_size]  a lane is the dimensions (2i, 2i + 1) of one key
//              V [block_size / 2][padded_dim]  a lane is one dimension of the keys (2j, 2j + 1)
//   float32    K [head_dim][block_size], V [block_size][padded_dim]  a lane is one number
//
// So scores = Q K and output = P V are one kind of product, "broadcast one lane of a row, multiply with a vector of
// lanes": neighbouring lanes are neighbouring keys (K) or dimensions (V), no sum ever crosses a vector, a load
// serves every query row of the tile, and bf16 pairs feed the AVX-512 bf16 dot product as they lie. Two bytes of a
// pair are in memory order, so a little-endian machine is assumed.
//
// Arithmetic of a row. Keys are taken in tiles of KEY_TILE counted from position 0, dimensions and keys in order
// within a tile, with an online softmax over tiles. Which rows share a register tile, decode or prefill, changes
// nothing in that order, so a row's bits do not depend on what else is in the batch nor on how it was chunked.

#ifndef BG_LEVEL

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#define BG_X86 1
#else
#define BG_X86 0
#endif

namespace {

constexpr int KEY_TILE = 128;  // keys per softmax step
constexpr int MAX_DIM = 256;
constexpr int MAX_ROWS = 48;  // query rows of one work item: few enough that their state stays in L2

struct Attention {
    const void* query;
    long query_token, query_head;  // strides
    void* out;                     // (num_tokens, num_heads, head_dim), contiguous
    const uint32_t* pool;
    const int32_t* block_table;
    long table_row;  // stride
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* items;  // (num_items, 4): sequence, KV head, first row, rows; row = token * group + head
    int num_heads, num_kv_heads, head_dim, block_size;
    float scale, soft_cap;  // soft_cap 0: none
    int window;             // 0: none
};

struct Rope {
    void *query, *key;
    const void* value;
    long query_token, query_head, key_token, key_head, value_token, value_head;  // strides
    const float *cosine, *sine;                                                  // (num_tokens, rotary_dim / 2)
    const int64_t* slots;
    uint32_t* pool;
    int num_heads, num_kv_heads, head_dim, rotary_dim, block_size, interleaved;
};

struct Norm {
    const void* x;
    long x_token, x_head;  // strides
    const void* weight;
    void* residual;  // null: none
    long residual_row;
    void* out;  // (num_tokens, heads, dim), contiguous
    int heads;  // rows of one token; 1 with a residual
    int dim;
    float eps;
};

struct Gate {
    const void* gate_up;
    long row;   // stride
    void* out;  // (rows, dim), contiguous
    int dim;
};

struct Gumbel {
    const int64_t* keys;
    const int32_t *positions, *samples;
    float* out;  // (rows, vocab), contiguous
    int vocab;
};

struct Kernels {  // [0] float32, [1] bfloat16; all but attention take a range of rows
    void (*attention[2])(const Attention&, const int32_t* item, const int32_t* next_item);
    void (*rope[2])(const Rope&, long begin, long end);
    void (*norm[2])(const Norm&, long begin, long end);
    void (*silu[2])(const Gate&, long begin, long end);
    void (*gelu[2])(const Gate&, long begin, long end);
    void (*gumbel)(const Gumbel&, long begin, long end);
};

inline int padded(int head_dim) { return (head_dim + 15) / 16 * 16; }

// Lanes of one block of one KV head.
inline long head_lanes(int block_size, int head_dim, bool bf16) {
    return static_cast<long>(block_size) * (head_dim + padded(head_dim)) / (bf16 ? 2 : 1);
}

// Runs work(begin, end) over contiguous parts of [0, n); below `grain` rows a second thread costs more than it gives.
template <class Work>
void split(int threads, long n, long grain, const Work& work) {
    const long parts = std::min<long>(threads, (n + grain - 1) / grain);
    if (parts <= 1) {
        if (n > 0) work(0, n);
        return;
    }
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (long part = 0; part < parts; ++part) work(n * part / parts, n * (part + 1) / parts);
}

}  // namespace

#if defined(__clang__)
#define BG_TARGET(features) \
    _Pragma(BG_TEXT(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define BG_TARGET_END _Pragma("clang attribute pop")
#else
#define BG_TARGET(features) _Pragma("GCC push_options") _Pragma(BG_TEXT(GCC target(features)))
#define BG_TARGET_END _Pragma("GCC pop_options")
#endif
#define BG_TEXT(...) #__VA_ARGS__

#define BG_LEVEL 0
#define BG_NAMESPACE portable
#include "ops.cpp"
#undef BG_LEVEL
#undef BG_NAMESPACE

#if BG_X86
#define BG_LEVEL 1
#define BG_NAMESPACE avx2
BG_TARGET("avx2,fma")
#include "ops.cpp"
BG_TARGET_END
#undef BG_LEVEL
#undef BG_NAMESPACE

#define BG_LEVEL 2
#define BG_NAMESPACE avx512
BG_TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#include "ops.cpp"
BG_TARGET_END
#undef BG_LEVEL
#undef BG_NAMESPACE

#define BG_LEVEL 3
#define BG_NAMESPACE avx512_bf16
BG_TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#include "ops.cpp"
BG_TARGET_END
#undef BG_LEVEL
#undef BG_NAMESPACE
#endif

namespace {

const Kernels* const LEVELS[] = {
    &portable::kernels,
#if BG_X86
    &avx2::kernels,
    &avx512::kernels,
    &avx512_bf16::kernels,
#endif
};

}  // namespace

extern "C" {

// Changes with any change of this interface, so that a library built from older source is not called wrongly.
int bg_interface() { return 1; }

// The highest level this machine runs.
int bg_best_level() {
#if BG_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
    return 0;
#endif
}

void bg_attention(int level, int threads, int bf16, const void* query, long query_token, long query_head, void* out,
                  const void* pool, const int32_t* block_table, long table_row, const int32_t* query_starts,
                  const int32_t* context_lens, const int32_t* items, long num_items, int num_heads, int num_kv_heads,
                  int head_dim, int block_size, float scale, float soft_cap, int window, long num_seqs,
                  long num_tokens) {
    const Attention work{query,       query_token,  query_head,   out,          static_cast<const uint32_t*>(pool),
                         block_table, table_row,    query_starts, context_lens, items,
                         num_heads,   num_kv_heads, head_dim,     block_size,   scale,
                         soft_cap,    window};
    const auto kernel = LEVELS[level]->attention[bf16];
    const long row_bytes = static_cast<long>(num_heads) * head_dim * (bf16 ? 2 : 4);
    const long used = query_starts[num_seqs];
    std::memset(static_cast<char*>(out) + used * row_bytes, 0, (num_tokens - used) * row_bytes);
    // Items come sorted by cost, the dearest first, so that handing them out one by one evens the threads out. A
    // thread takes its next item before it does the present one, to fetch the next one's first keys meanwhile.
    std::atomic<long> taken{0};
#pragma omp parallel num_threads(threads)
    {
        const auto take = [&] {
            const long i = taken.fetch_add(1, std::memory_order_relaxed);
            return i < num_items ? items + 4 * i : nullptr;
        };
        for (const int32_t *item = take(), *next; item; item = next) {
            next = take();
            kernel(work, item, next);
        }
    }
}

void bg_rope_and_write(int level, int threads, int bf16, void* query, long query_token, long query_head, void* key,
                       long key_token, long key_head, const void* value, long value_token, long value_head,
                       const float* cosine, const float* sine, const int64_t* slots, long num_tokens, void* pool,
                       int num_heads, int num_kv_heads, int head_dim, int rotary_dim, int block_size, int interleaved) {
    const Rope work{query,
                    key,
                    value,
                    query_token,
                    query_head,
                    key_token,
                    key_head,
                    value_token,
                    value_head,
                    cosine,
                    sine,
                    slots,
                    static_cast<uint32_t*>(pool),
                    num_heads,
                    num_kv_heads,
                    head_dim,
                    rotary_dim,
                    block_size,
                    interleaved};
    const auto kernel = LEVELS[level]->rope[bf16];
    split(threads, num_tokens, 8, [&](long begin, long end) { kernel(work, begin, end); });
}

void bg_rms_norm(int level, int threads, int bf16, const void* x, long x_token, long x_head, const void* weight,
                 void* residual, long residual_row, void* out, long num_tokens, int heads, int dim, float eps) {
    const Norm work{x, x_token, x_head, weight, residual, residual_row, out, heads, dim, eps};
    const auto kernel = LEVELS[level]->norm[bf16];
    split(threads, num_tokens * heads, 1 + 16384 / dim, [&](long begin, long end) { kernel(work, begin, end); });
}

void bg_gate(int level, int threads, int bf16, int gelu, const void* gate_up, long row, void* out, long rows, int dim) {
    const Gate work{gate_up, row, out, dim};
    const auto kernel = gelu ? LEVELS[level]->gelu[bf16] : LEVELS[level]->silu[bf16];
    split(threads, rows, 1 + 8192 / dim, [&](long begin, long end) { kernel(work, begin, end); });
}

void bg_gumbel(int level, int threads, const int64_t* keys, const int32_t* positions, const int32_t* samples,
               float* out, long rows, int vocab) {
    const Gumbel work{keys, positions, samples, out, vocab};
    const auto kernel = LEVELS[level]->gumbel;
    split(threads, rows, 1 + 8192 / vocab, [&](long begin, long end) { kernel(work, begin, end); });
}

}  // extern "C"

#else  // BG_LEVEL: the kernels, compiled once per level

namespace {
namespace BG_NAMESPACE {

// ---- vectors of W lanes ---------------------------------------------------------------------------------------

constexpr int W = BG_LEVEL >= 2 ? 16 : BG_LEVEL == 1 ? 8 : 4;
constexpr int ROWS = 6;                         // of a register tile: ROWS x VECTORS sums + VECTORS loads + 1
constexpr int VECTORS = BG_LEVEL >= 2 ? 4 : 2;  // fit 32 registers with AVX-512, 16 without

typedef float Floats __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Lanes __attribute__((vector_size(W * 4)));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));

template <class V, class T>
inline V load(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
inline void store(T* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

inline Floats splat(float x) { return x - Floats{}; }
inline Lanes splat(uint32_t x) { return x + Lanes{}; }

inline Floats lane_numbers() {
    Floats v;
    for (int i = 0; i < W; ++i) v[i] = static_cast<float>(i);
    return v;
}

// maximum(a, b) and minimum(a, b) are b where either is NaN, so that a NaN put second survives.
#if BG_LEVEL >= 2
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline float largest(Floats v) { return _mm512_reduce_max_ps(v); }
inline float total(Floats v) { return _mm512_reduce_add_ps(v); }
#elif BG_LEVEL == 1
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
#else
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Floats minimum(Floats a, Floats b) { return a < b ? a : b; }
#endif

#if BG_LEVEL < 2
inline float largest(Floats v) {
    float best = v[0];
    for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
    return best;
}

inline float total(Floats v) {
    float sum = v[0];
    for (int i = 1; i < W; ++i) sum += v[i];
    return sum;
}
#endif

inline Floats floats(Halves h) { return (Floats)(__builtin_convertvector(h, Lanes) << 16); }

// To bfloat16, to nearest even; a NaN stays one.
inline Halves halves(Floats f) {
#if BG_LEVEL >= 3
    return (Halves)_mm512_cvtneps_pbh(f);
#else
    const Lanes bits = (Lanes)f;
    const Lanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(f == f ? rounded : Lanes{} + 0x7fc0, Halves);
#endif
}

// Up to W numbers of either dtype from memory and back.
inline Floats read(const float* from, long left) {
    if (left >= W) return load<Floats>(from);
    Floats v{};
    std::memcpy(&v, from, left * sizeof(float));
    return v;
}

inline Floats read(const uint16_t* from, long left) {
    if (left >= W) return floats(load<Halves>(from));
    Halves h{};
    std::memcpy(&h, from, left * sizeof(uint16_t));
    return floats(h);
}

inline void write(float* to, Floats v, long left) {
    if (left >= W) return store(to, v);
    std::memcpy(to, &v, left * sizeof(float));
}

inline void write(uint16_t* to, Floats v, long left) {
    const Halves h = halves(v);
    if (left >= W) return store(to, h);
    std::memcpy(to, &h, left * sizeof(uint16_t));
}

inline Floats rounded(const float*, Floats v) { return v; }
inline Floats rounded(const uint16_t*, Floats v) { return floats(halves(v)); }

// 2 ** x with a relative error of 1e-7: exact at 0, exactly 0 far below it, infinity from 128 on; a NaN stays one.
inline Floats exp2(Floats x) {
    x = minimum(splat(160.0f), maximum(splat(-160.0f), x));
#if BG_LEVEL >= 2
    const Floats whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Floats magic = splat(12582912.0f);  // 1.5 * 2 ** 23: adding it leaves the rounded number in the low bits
    const Floats shifted = x + magic;
    const Floats whole = shifted - magic;
#endif
    const Floats part = x - whole;
    Floats y = fma(splat(1.3265226493e-3f), part, splat(9.6712317089e-3f));
    y = fma(y, part, splat(5.5507284767e-2f));
    y = fma(y, part, splat(2.4022248128e-1f));
    y = fma(y, part, splat(6.9314698601e-1f));
    y = fma(y, part, splat(1.0f));
#if BG_LEVEL >= 2
    return _mm512_scalef_ps(y, whole);
#else
    const Floats scaled = (Floats)((Lanes)y + ((Lanes)shifted << 23));
    return x < -126.0f ? Floats{} : x < 128.0f ? scaled : x + splat(INFINITY);
#endif
}

// Natural logarithm of positive normal numbers; relatively exact near 1 too.
inline Floats log(Floats x) {
    const Ints bits = (Ints)x;
    const Ints exponent = (bits - 0x3f3504f3) >> 23;  // puts the mantissa into [sqrt(1/2), sqrt(2))
    const Floats f = (Floats)(bits - (exponent << 23)) - 1.0f;
    const Floats e = __builtin_convertvector(exponent, Floats);
    Floats y = fma(splat(7.3306544301e-2f), f, splat(-1.1659490338e-1f));
    y = fma(y, f, splat(1.1635067725e-1f));
    y = fma(y, f, splat(-1.2396770081e-1f));
    y = fma(y, f, splat(1.4251127110e-1f));
    y = fma(y, f, splat(-1.6669148053e-1f));
    y = fma(y, f, splat(2.0000688751e-1f));
    y = fma(y, f, splat(-2.4999981214e-1f));
    y = fma(y, f, splat(3.3333331254e-1f));
    const Floats square = f * f;
    y = fma(y * f, square, e * -2.12194440e-4f);  // ln 2 in two parts, the high one exact for any exponent
    y = fma(square, splat(-0.5f), y);
    return fma(e, splat(0.693359375f), f + y);
}

constexpr float LOG2_E = 1.44269504088896341f;

// call(n) with n, one of 1 .. Most, as a compile-time constant.
template <int Most, class Call>
inline void choose(int n, const Call& call) {
    if constexpr (Most > 0) {
        if (n == Most)
            call(std::integral_constant<int, Most>{});
        else
            choose<Most - 1>(n, call);
    }
}

// ---- the product: rows x vectors of sums ------------------------------------------------------------------------

// How one broadcast element of a row meets a vector of lanes. `Left` is what rows are packed as, PER_LANE how many
// numbers a lane of the pool holds, PER_STEP how many Left elements one lane takes, STRIDE elements from row to row.

struct Single {  // float32
    typedef float Number;
    typedef float Left;
    typedef Floats Right;
    static constexpr int PER_LANE = 1, PER_STEP = 1, STRIDE = MAX_DIM;

    template <int R, int V>
    static inline void step(Floats (&sums)[R][V], const Left* left, const Right (&right)[V]) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Floats x = splat(left[r * STRIDE]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = fma(x, right[v], sums[r][v]);
        }
    }
    static inline void pack(const Number* from, int n, Left* to) { std::memcpy(to, from, n * sizeof(Number)); }
    static inline void pack(Floats first, Floats second, Left* to) {
        store(to, first);
        store(to + W, second);
    }
};

#if BG_LEVEL >= 3
struct Pairs {  // bfloat16 by the pairwise dot product
    typedef uint16_t Number;
    typedef uint32_t Left;
    typedef __m512bh Right;
    static constexpr int PER_LANE = 2, PER_STEP = 1, STRIDE = MAX_DIM / 2;

    template <int R, int V>
    static inline void step(Floats (&sums)[R][V], const Left* left, const Right (&right)[V]) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Right x = (Right)splat(left[r * STRIDE]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, right[v]);
        }
    }
    static inline void pack(const Number* from, int n, Left* to) { std::memcpy(to, from, n * sizeof(Number)); }
    static inline void pack(Floats first, Floats second, Left* to) { store(to, _mm512_cvtne2ps_pbh(second, first)); }
};
#else
struct Pairs {  // bfloat16 widened: a lane's low half is its first number, its high half the second
    typedef uint16_t Number;
    typedef float Left;
    typedef Lanes Right;
    static constexpr int PER_LANE = 2, PER_STEP = 2, STRIDE = MAX_DIM;

    template <int R, int V>
    static inline void step(Floats (&sums)[R][V], const Left* left, const Right (&right)[V]) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            Floats wide[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) wide[v] = (Floats)(half ? right[v] & 0xffff0000u : right[v] << 16);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Floats x = splat(left[r * STRIDE + half]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sums[r][v] = fma(x, wide[v], sums[r][v]);
            }
        }
    }
    static inline void pack(const Number* from, int n, Left* to) {
        for (int i = 0; i < n; i += W) store(to + i, read(from + i, n - i));
    }
    static inline void pack(Floats first, Floats second, Left* to) {
        store(to, first);
        store(to + W, second);
    }
};
#endif

// A decode reads every key and value once, block by block all over memory, which the hardware does not foresee: so
// each step of a product also asks for what will be read LEAD steps later. A piece is the 256 bytes a step of the
// usual shape reads; lists of pieces say where the reading goes on behind a product's own end.
constexpr int LEAD = 24;
constexpr int PIECE = 64;  // lanes

inline void fetch(const uint32_t* piece) {
    for (int line = 0; line < PIECE; line += 16) __builtin_prefetch(piece + line);
}

// The first LEAD pieces of `count` blocks that are read side by side.
inline void list_pieces(const uint32_t* const* blocks, int count, const uint32_t** pieces) {
    for (int i = 0, offset = 0; i < LEAD; offset += PIECE)
        for (int b = 0; b < count && i < LEAD; ++b) pieces[i++] = blocks[b] + offset;
}

// Loads the V vectors of a step, into registers: the compiler would rather read them again for every row.
template <class Right, int V, class From>
inline void load_right(Right (&right)[V], const From& from) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
        right[v] = load<Right>(from(v));
#if BG_LEVEL >= 2
        asm("" : "+v"(right[v]));
#elif BG_LEVEL == 1
        asm("" : "+x"(right[v]));
#endif
    }
}

// out[r][v * W ...] = the scores of R rows with V vectors of keys. `pieces` are read next; null where another row's
// product has fetched everything already.
template <class E, int R, int V>
__attribute__((noinline)) void score(const typename E::Left* left, const uint32_t* const* keys, long stride, int steps,
                                     const uint32_t* const* pieces, float* out) {
    Floats sums[R][V] = {};
    const int turn = std::max(0, steps - LEAD);
    for (int k = 0; k < steps; ++k) {
        if (pieces) {
            if (k >= turn)
                fetch(pieces[k - turn]);
            else
                for (int v = 0; v < V; v += 16 / W) __builtin_prefetch(keys[v] + (k + LEAD) * stride);
        }
        typename E::Right right[V];
        load_right(right, [&](int v) { return keys[v] + k * stride; });
        E::template step<R, V>(sums, left + k * E::PER_STEP, right);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(out + r * KEY_TILE + v * W, sums[r][v]);
}

template <class Left>
struct Run {  // value rows that lie one after the other, and the weights that go with them
    const uint32_t* values;
    const Left* left;
    int steps;
};

// out[r][v * W ...] = out * decay[r] + weights x values, for R rows and V vectors of dimensions from `column` on.
// `pieces` are the runs' own and then what is read next; null where nothing is to be fetched.
template <class E, int R, int V>
__attribute__((noinline)) void accumulate(const Run<typename E::Left>* runs, int num_runs, int column, int stride,
                                          const float* decay, const uint32_t* const* pieces, float* out) {
    int read = LEAD * PIECE, piece = LEAD;
    Floats sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = load<Floats>(out + r * stride + v * W) * decay[r];
    for (int i = 0; i < num_runs; ++i) {
        const uint32_t* values = runs[i].values + column;
        const typename E::Left* left = runs[i].left;
        for (int k = 0; k < runs[i].steps; ++k) {
            if (pieces)
                for (read += stride; (piece + 1) * PIECE <= read; ++piece) fetch(pieces[piece]);
            typename E::Right right[V];
            load_right(right, [&](int v) { return values + k * stride + v * W; });
            E::template step<R, V>(sums, left + k * E::PER_STEP, right);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(out + r * stride + v * W, sums[r][v]);
}

// ---- attention ----------------------------------------------------------------------------------------------------

// Which query rows and which keys a work item is about. A row here counts from the item's first.
struct Item {
    int sequence, kv_head, first, rows, group, start, past, window;

    Item(const Attention& a, const int32_t* item)
        : sequence(item[0]),
          kv_head(item[1]),
          first(item[2]),
          rows(item[3]),
          group(a.num_heads / a.num_kv_heads),
          start(a.query_starts[sequence]),
          past(a.context_lens[sequence] - (a.query_starts[sequence + 1] - start)),
          window(a.window) {}

    int token(int row) const { return start + (first + row) / group; }
    int head(int row) const { return kv_head * group + (first + row) % group; }
    int keys_begin(int row) const { return window > 0 ? std::max(0, keys_end(row) - window) : 0; }
    int keys_end(int row) const { return past + (first + row) / group + 1; }  // its own key included
    int tiles_begin() const { return keys_begin(0) / KEY_TILE * KEY_TILE; }

    // The blocks of the tile of keys at `base`, each a pointer to this KV head's keys and values.
    int find_blocks(const Attention& a, long lanes, int base, const uint32_t** blocks) const {
        const int32_t* table = a.block_table + sequence * a.table_row + base / a.block_size;
        const int keys = std::min(KEY_TILE, keys_end(rows - 1) - base), count = (keys - 1) / a.block_size + 1;
        for (int i = 0; i < count; ++i)
            blocks[i] = a.pool + (static_cast<long>(table[i]) * a.num_kv_heads + kv_head) * lanes;
        return count;
    }
};

template <class E>
struct Tile {  // up to ROWS query rows against one tile of keys
    typedef typename E::Left Left;
    static_assert(KEY_TILE * E::PER_STEP / E::PER_LANE <= E::STRIDE, "a tile's weights fit a row");
    alignas(64) float scores[ROWS * KEY_TILE];
    alignas(64) Left weights[ROWS * E::STRIDE];
    alignas(64) uint32_t last_pair[MAX_DIM];
    const uint32_t *blocks[KEY_TILE / 16], *next_blocks[KEY_TILE / 16];
    const uint32_t* pieces[KEY_TILE * MAX_DIM / PIECE + LEAD];  // of the values, then of the next tile's keys
    float decay[ROWS];

    // Lists the pieces of the values of the first `keys` keys and then of the next tile, if there is one.
    void list_values(int keys, int block, long block_keys, int width, int num_next) {
        int count = 0;
        for (int b = 0; b * block < keys; ++b) {
            const int lanes = std::min(block, keys - b * block) * width / E::PER_LANE;
            for (int lane = 0; lane < lanes; lane += PIECE) pieces[count++] = blocks[b] + block_keys + lane;
        }
        if (num_next > 0)
            list_pieces(next_blocks, std::min(num_next, blocks_per_call(block)), pieces + count);
        else
            std::fill(pieces + count, pieces + count + LEAD, pieces[count - 1]);
    }

    static int blocks_per_call(int block) { return std::max(1, VECTORS * W / block); }

    // The scores of the key vectors [v, end).
    template <int R>
    void score_keys(const Left* queries, int v, int end, int block, int steps, bool ahead) {
        const uint32_t *keys[KEY_TILE / W], *next[LEAD];
        for (int i = v; i < end; ++i) keys[i] = blocks[i * W / block] + i * W % block;
        for (; v + VECTORS < end; v += VECTORS) {
            if (ahead) {
                const int b = (v + VECTORS) * W / block, rest = (end * W - 1) / block + 1 - b;
                list_pieces(blocks + b, std::min(rest, blocks_per_call(block)), next);
            }
            score<E, R, VECTORS>(queries, keys + v, block, steps, ahead ? next : nullptr, scores + v * W);
        }
        choose<VECTORS>(end - v, [&](auto vectors) {
            score<E, R, vectors()>(queries, keys + v, block, steps, ahead ? pieces : nullptr, scores + v * W);
        });
    }

    // Adds what the keys [key, end) give; `block_keys` is the lanes of a block's keys, `width` those of a value row.
    template <int R>
    void add_values(int key, int end, int block, long block_keys, int width, bool ahead, float* out) {
        Run<Left> runs[KEY_TILE / 16 + 1];
        int num_runs = 0;
        const auto add = [&](const uint32_t* values, int first, int keys) {
            runs[num_runs++] = {values, weights + first * E::PER_STEP / E::PER_LANE, keys / E::PER_LANE};
        };
        const auto row = [&](int k) { return blocks[k / block] + block_keys + k % block / E::PER_LANE * width; };
        const int odd = end % E::PER_LANE;
        for (int next; key < end - odd; key = next) {
            next = std::min(end - odd, (key / block + 1) * block);
            add(row(key), key, next - key);
        }
        if (odd) {  // the pair's other half may never have been written: it counts as zero
            const uint32_t* values = row(end - 1);
            for (int d = 0; d < width; ++d) last_pair[d] = values[d] & 0xffffu;
            add(last_pair, end - 1, 2);
        }
        const uint32_t* const* fetched = ahead ? pieces : nullptr;  // by the first pass over the columns
        for (int c = 0; c < width; c += VECTORS * W, fetched = nullptr)
            choose<VECTORS>(std::min(VECTORS, (width - c) / W), [&](auto vectors) {
                accumulate<E, R, vectors()>(runs, num_runs, c, width, decay, fetched, out + c);
            });
    }

    // cap * tanh(scale * x / cap) = cap - 2 cap / (exp(2 scale x / cap) + 1)
    static void cap(float* row, int v, int end, float soft_cap, float scale) {
        const Floats inner = splat(2 * LOG2_E * scale / soft_cap);
        for (; v < end; ++v) {
            const Floats e = exp2(load<Floats>(row + v * W) * inner);
            store(row + v * W, soft_cap - 2 * soft_cap / (e + 1.0f));
        }
    }

    // Turns row r's scores of the key vectors [first, end) into weights; keys outside [begin, stop) get none. `peak`
    // is the row's largest score so far, in units of log2 and taken after scaling, so that no rounding of it is left
    // in the result; `sum` are the weights so far.
    void soften(int r, int first, int end, int begin, int stop, float factor, float& peak, Floats& sum) {
        float* row = scores + r * KEY_TILE;
        Floats best = splat(-INFINITY);
        for (int v = first; v < end; ++v) {
            Floats x = load<Floats>(row + v * W);
            if (v * W < begin || v * W + W > stop) {
                const Floats key = lane_numbers() + static_cast<float>(v * W);
                const Ints seen = (key >= static_cast<float>(begin)) & (key < static_cast<float>(stop));
                x = seen ? x : splat(-INFINITY);
                store(row + v * W, x);
            }
            best = maximum(best, x);
        }
        const float before = peak;
        peak = std::max(before, largest(best) * factor);
        const Floats change = exp2(splat(before - peak));
        decay[r] = change[0];
        sum *= change;
        for (int v = first; v < end; v += 2) {
            Floats weight[2] = {};
            for (int i = 0; i < 2 && v + i < end; ++i) {
                weight[i] = exp2(fma(load<Floats>(row + (v + i) * W), splat(factor), splat(-peak)));
                sum += weight[i];
            }
            E::pack(weight[0], weight[1], weights + r * E::STRIDE + v * W * E::PER_STEP / E::PER_LANE);
        }
    }
};

template <class E>
void attention(const Attention& a, const int32_t* item_words, const int32_t* next_words) {
    typedef typename E::Number Number;
    const Item item(a, item_words);
    const int dim = a.head_dim, width = padded(dim), block = a.block_size, steps = dim / E::PER_LANE;
    const long lanes = head_lanes(block, dim, E::PER_LANE == 2), block_keys = static_cast<long>(block) * steps;
    const float factor = a.soft_cap > 0 ? LOG2_E : LOG2_E * a.scale;

    alignas(64) typename E::Left queries[MAX_ROWS * E::STRIDE];
    alignas(64) float outputs[MAX_ROWS * MAX_DIM];
    Floats sums[MAX_ROWS];
    float peaks[MAX_ROWS];
    Tile<E> tile;
    for (int r = 0; r < item.rows; ++r) {
        const Number* query = static_cast<const Number*>(a.query);
        E::pack(query + item.token(r) * a.query_token + item.head(r) * a.query_head, dim, queries + r * E::STRIDE);
        sums[r] = Floats{};
        peaks[r] = -1e30f;  // finite, so that a tile without a key for this row changes nothing
    }
    std::memset(outputs, 0, sizeof(float) * item.rows * width);

    const int parts = (item.rows + ROWS - 1) / ROWS;
    const int keys_end = item.keys_end(item.rows - 1);
    for (int base = item.tiles_begin(); base < keys_end; base += KEY_TILE) {
        item.find_blocks(a, lanes, base, tile.blocks);
        int num_next = 0;
        if (base + KEY_TILE < keys_end) {
            num_next = item.find_blocks(a, lanes, base + KEY_TILE, tile.next_blocks);
        } else if (next_words) {
            const Item next(a, next_words);
            num_next = next.find_blocks(a, lanes, next.tiles_begin(), tile.next_blocks);
        }
        tile.list_values(std::min(KEY_TILE, keys_end - base), block, block_keys, width, num_next);
        for (int part = 0; part < parts; ++part) {
            const int row = item.rows * part / parts, count = item.rows * (part + 1) / parts - row;
            const int begin = std::max(0, item.keys_begin(row) - base);
            const int end = std::min(KEY_TILE, item.keys_end(row + count - 1) - base);
            if (end <= begin) continue;
            const int first = begin / W, last = (end + W - 1) / W;
            const bool ahead = part == 0;  // the first part's reading serves the others
            choose<ROWS>(count, [&](auto r) {
                tile.template score_keys<r()>(queries + row * E::STRIDE, first, last, block, steps, ahead);
            });
            for (int r = 0; r < count; ++r) {
                if (a.soft_cap > 0) tile.cap(tile.scores + r * KEY_TILE, first, last, a.soft_cap, a.scale);
                tile.soften(r, first, last, item.keys_begin(row + r) - base, item.keys_end(row + r) - base, factor,
                            peaks[row + r], sums[row + r]);
            }
            choose<ROWS>(count, [&](auto r) {
                tile.template add_values<r()>(first * W, end, block, block_keys, width, ahead, outputs + row * width);
            });
        }
    }
    for (int r = 0; r < item.rows; ++r) {
        const long row = static_cast<long>(item.token(r)) * a.num_heads + item.head(r);
        Number* out = static_cast<Number*>(a.out) + row * dim;
        const Floats share = splat(1.0f / total(sums[r]));
        for (int d = 0; d < dim; d += W) write(out + d, load<Floats>(outputs + r * width + d) * share, dim - d);
    }
}

// ---- rope and write -------------------------------------------------------------------------------------------------

template <class T>
inline void rotate(T* head, const float* cosine, const float* sine, int rotary_dim, bool interleaved) {
    const int half = rotary_dim / 2;
    float x[MAX_DIM], y[MAX_DIM];
    for (int i = 0; i < rotary_dim; i += W) write(x + i, read(head + i, rotary_dim - i), rotary_dim - i);
    if (interleaved) {
        for (int i = 0; i < half; ++i) {
            y[2 * i] = x[2 * i] * cosine[i] - x[2 * i + 1] * sine[i];
            y[2 * i + 1] = x[2 * i + 1] * cosine[i] + x[2 * i] * sine[i];
        }
    } else {
        for (int i = 0; i < half; ++i) {
            y[i] = x[i] * cosine[i] - x[half + i] * sine[i];
            y[half + i] = x[half + i] * cosine[i] + x[i] * sine[i];
        }
    }
    for (int i = 0; i < rotary_dim; i += W) write(head + i, read(y + i, rotary_dim - i), rotary_dim - i);
}

inline void write_key(const float* key, int dim, uint32_t* lanes, int block, int at) {
    for (int d = 0; d < dim; ++d) std::memcpy(lanes + static_cast<long>(d) * block + at, key + d, 4);
}

inline void write_key(const uint16_t* key, int dim, uint32_t* lanes, int block, int at) {
    for (int d = 0; d < dim; d += 2) std::memcpy(lanes + static_cast<long>(d / 2) * block + at, key + d, 4);
}

inline void write_value(const float* value, int dim, uint32_t* lanes, int width, int at) {
    std::memcpy(lanes + static_cast<long>(at) * width, value, dim * sizeof(float));
}

// Only its own half of each pair: another thread may be writing the neighbour's.
inline void write_value(const uint16_t* value, int dim, uint32_t* lanes, int width, int at) {
    uint16_t* row = reinterpret_cast<uint16_t*>(lanes + static_cast<long>(at / 2) * width) + at % 2;
    for (int d = 0; d < dim; ++d) row[2 * d] = value[d];
}

template <class T>
void rope(const Rope& a, long begin, long end) {
    const int dim = a.head_dim, width = padded(dim), per_lane = sizeof(T) == 2 ? 2 : 1;
    const long lanes = head_lanes(a.block_size, dim, per_lane == 2);
    for (long t = begin; t < end; ++t) {
        const float* cosine = a.cosine + t * (a.rotary_dim / 2);
        const float* sine = a.sine + t * (a.rotary_dim / 2);
        T* query = static_cast<T*>(a.query) + t * a.query_token;
        for (int h = 0; h < a.num_heads; ++h)
            rotate(query + h * a.query_head, cosine, sine, a.rotary_dim, a.interleaved);
        const int64_t slot = a.slots[t];
        const int at = static_cast<int>(slot % a.block_size);
        for (int h = 0; h < a.num_kv_heads; ++h) {
            T* key = static_cast<T*>(a.key) + t * a.key_token + h * a.key_head;
            rotate(key, cosine, sine, a.rotary_dim, a.interleaved);
            if (slot < 0) continue;
            uint32_t* head = a.pool + (slot / a.block_size * a.num_kv_heads + h) * lanes;
            write_key(key, dim, head, a.block_size, at);
            write_value(static_cast<const T*>(a.value) + t * a.value_token + h * a.value_head, dim,
                        head + static_cast<long>(a.block_size) * dim / per_lane, width, at);
        }
    }
}

// ---- rows: norm, gated activations, noise ------------------------------------------------------------------------

template <class T>
void norm(const Norm& a, long begin, long end) {
    const T* weight = static_cast<const T*>(a.weight);
    for (long row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(a.x) + row / a.heads * a.x_token + row % a.heads * a.x_head;
        T* out = static_cast<T*>(a.out) + row * a.dim;
        Floats squares{};
        if (a.residual) {
            T* residual = static_cast<T*>(a.residual) + row * a.residual_row;
            for (long i = 0; i < a.dim; i += W) {
                const Floats v = rounded(x, read(x + i, a.dim - i) + read(residual + i, a.dim - i));
                write(residual + i, v, a.dim - i);
                squares = fma(v, v, squares);
            }
            x = residual;
        } else {
            for (long i = 0; i < a.dim; i += W) {
                const Floats v = read(x + i, a.dim - i);
                squares = fma(v, v, squares);
            }
        }
        const Floats scale = splat(1.0f / std::sqrt(total(squares) / static_cast<float>(a.dim) + a.eps));
        for (long i = 0; i < a.dim; i += W) {
            const Floats v = rounded(x, read(x + i, a.dim - i) * scale);
            write(out + i, read(weight + i, a.dim - i) * v, a.dim - i);
        }
    }
}

struct Silu {  // x * sigmoid(x)
    static inline Floats exponent(Floats x) { return x * -LOG2_E; }
};

struct GeluTanh {  // x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x ** 3))
    static inline Floats exponent(Floats x) {
        const Floats cube = x * x * x;
        return fma(cube, splat(0.044715f), x) * (-2 * 0.79788456080286536f * LOG2_E);
    }
};

template <class T, class Activation>
void gate(const Gate& a, long begin, long end) {
    for (long row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(a.gate_up) + row * a.row;
        const T* up = x + a.dim;
        T* out = static_cast<T*>(a.out) + row * a.dim;
        for (long i = 0; i < a.dim; i += W) {
            const Floats v = read(x + i, a.dim - i);
            const Floats active = v / (1.0f + exp2(Activation::exponent(v)));
            write(out + i, rounded(x, active) * read(up + i, a.dim - i), a.dim - i);
        }
    }
}

// The high and low words of x * m, lane by lane.
inline void multiply(Lanes x, uint32_t m, Lanes& high, Lanes& low) {
    low = x * m;
#if BG_LEVEL >= 2
    const __m512i factor = _mm512_set1_epi32(static_cast<int>(m));
    const __m512i even = _mm512_mul_epu32((__m512i)x, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), factor);
    high = (Lanes)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif BG_LEVEL == 1
    const __m256i factor = _mm256_set1_epi32(static_cast<int>(m));
    const __m256i even = _mm256_mul_epu32((__m256i)x, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), factor);
    high = (Lanes)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
    for (int i = 0; i < W; ++i) high[i] = static_cast<uint32_t>(static_cast<uint64_t>(x[i]) * m >> 32);
#endif
}

// Philox4x32-10: W counters (quad, position, sample, 0) at once; word j of a counter is the draw of token 4 quad + j.
inline void philox(Lanes (&c)[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        Lanes high0, low0, high1, low1;
        multiply(c[0], 0xd2511f53u, high0, low0);
        multiply(c[2], 0xcd9e8d57u, high1, low1);
        c[0] = high1 ^ c[1] ^ key0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ key1;
        c[3] = low0;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

// The lanes of the first or the second half of a and b, alternating.
template <int Half, int... I>
inline Lanes zip(Lanes a, Lanes b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (I % 2 * W + Half * W / 2 + I / 2)...);
#else
    return Lanes{(I % 2 ? b : a)[Half * W / 2 + I / 2]...};
#endif
}

template <int Half>
inline Lanes zip(Lanes a, Lanes b) {
    return zip<Half>(a, b, std::make_integer_sequence<int, W>{});
}

void gumbel(const Gumbel& a, long begin, long end) {
    Lanes numbers;
    for (int i = 0; i < W; ++i) numbers[i] = static_cast<uint32_t>(i);
    for (long row = begin; row < end; ++row) {
        const uint64_t key = static_cast<uint64_t>(a.keys[row]);
        float* out = a.out + row * a.vocab;
        for (int first = 0; first < a.vocab; first += 4 * W) {
            Lanes c[] = {numbers + static_cast<uint32_t>(first / 4), splat(static_cast<uint32_t>(a.positions[row])),
                         splat(static_cast<uint32_t>(a.samples[row])), Lanes{}};
            philox(c, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
            const Lanes even[] = {zip<0>(c[0], c[2]), zip<1>(c[0], c[2])};
            const Lanes odd[] = {zip<0>(c[1], c[3]), zip<1>(c[1], c[3])};
            const Lanes words[] = {zip<0>(even[0], odd[0]), zip<1>(even[0], odd[0]),  // by token
                                   zip<0>(even[1], odd[1]), zip<1>(even[1], odd[1])};
            for (int j = 0; j < 4 && first + j * W < a.vocab; ++j) {
                const Floats uniform = (__builtin_convertvector((Ints)(words[j] >> 9), Floats) + 0.5f) * 0x1p-23f;
                write(out + first + j * W, -log(-log(uniform)), a.vocab - first - j * W);
            }
        }
    }
}

const Kernels kernels = {
    {attention<Single>, attention<Pairs>},
    {rope<float>, rope<uint16_t>},
    {norm<float>, norm<uint16_t>},
    {gate<float, Silu>, gate<uint16_t, Silu>},
    {gate<float, GeluTanh>, gate<uint16_t, GeluTanh>},
    gumbel,
};

}  // namespace BG_NAMESPACE
}  // namespace

#endif  // BG_LEVEL
