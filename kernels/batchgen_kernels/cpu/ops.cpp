// Paged attention, rope with KV write, norm, gated activations, keyed noise and matmuls on a CPU, behind a plain
// C interface.
//
// The kernels stand in the headers beside this file, written in terms of a vector of W floats. This file includes
// itself again once per instruction set (BG_LEVEL) with the compiler's target switched, collects each set of kernels
// in a table, and exports functions that take the level as an argument, so that one binary serves every machine.
// Nothing here knows Python or torch: pointers, sizes and strides (in elements) come in, checked by the caller.

#ifndef BG_LEVEL

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <thread>
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
constexpr int ITEM_WORDS = 6;
constexpr int MAX_DIM = 256;
constexpr int GROUP = 64;  // inputs of an 8-bit matmul that share a scale in a row of activations
constexpr int PANEL = 16;  // output channels that a weight keeps together
constexpr int MAX_LINEAR_ROWS = 12;  // of a register tile of a matmul at most
constexpr long PART_BYTES = 192 << 10;  // of rows that a matmul takes at once, but no fewer than
constexpr long PART_TILES = 12;         // register tiles
constexpr int MAX_ROWS = 48;  // query rows of one work item: few enough that their state stays in L2

struct Attention {
    int bf16;  // query and out; else float32
    const void* query;
    long query_token, query_head;  // strides
    void* out;                     // (num_tokens, num_heads, value_dim), contiguous
    const uint32_t* pool;
    const int32_t* block_table;
    long table_row;  // stride
    const int32_t* tokens;  // (num_live, 2): place in the batch, number of keys seen
    float* states;          // of rows between two items, state_floats() each: (token in `tokens`, num_heads)
    const float* sinks;     // of the heads; null: none
    int num_heads, num_kv_heads, head_dim, value_dim, block_size;
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
    int num_heads, num_kv_heads, head_dim, value_dim, rotary_dim, block_size, interleaved;
};

struct Norm {
    const void* x;
    long x_token, x_head;  // strides
    const float* weight;
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

struct Int8Linear {
    const void* x;
    long x_row;             // stride
    const int32_t* weight;  // panels, see matmul.h
    const float* scales;    // of the channels, padded to whole panels, as are their sums
    const int32_t* sums;    // (groups, channels)
    const float* bias;  // null: none
    void* out;          // (rows, out_features), contiguous
    long rows;
    int in_features, out_features;
    int32_t* lanes;     // room for the quantised rows
    float* row_scales;  // and for their scales

    int quads() const { return (in_features + 3) / 4; }
    int groups() const { return (in_features + GROUP - 1) / GROUP; }
    long padded_channels() const { return (out_features + PANEL - 1L) / PANEL * PANEL; }
};

struct FloatLinear {
    const void* x;
    long x_row;          // stride
    const void* weight;  // panels, see matmul.h
    const void* bias;    // null: none
    void* out;           // (rows, out_features), contiguous
    long rows;
    int in_features, out_features;
    void* lanes;  // room for the rows in another order

    long lanes_of(int inputs) const { return (in_features + inputs - 1) / inputs; }
};

struct Kernels {  // [0] float32, [1] bfloat16, the pool's first; all but attention take a range of rows
    void (*attention[2])(const Attention&, const int32_t* item, const int32_t* next_item);
    void (*rope[2][2])(const Rope&, long begin, long end);
    void (*norm[2])(const Norm&, long begin, long end);
    void (*silu[2])(const Gate&, long begin, long end);
    void (*gelu[2])(const Gate&, long begin, long end);
    void (*gumbel)(const Gumbel&, long begin, long end);
    void (*quantize[2])(const Int8Linear&, long begin, long end);  // of register tiles of rows
    void (*int8_linear[2])(const Int8Linear&, long group, long begin, long end);  // by the output's numbers
    void (*order_rows[2])(const FloatLinear&, long begin, long end);  // of register tiles of rows
    void (*float_linear[2][2])(const FloatLinear&, long group, long begin, long end);  // [1][0]: float32 of bfloat16
    int linear_rows, linear_forms, float_rows, linear_channels;  // of a register tile
};

inline int padded(int value_dim) { return (value_dim + 15) / 16 * 16; }

// Lanes of one block of one KV head.
inline long head_lanes(int block_size, int head_dim, int value_dim, bool bf16) {
    return static_cast<long>(block_size) * (head_dim + padded(value_dim)) / (bf16 ? 2 : 1);
}

// A row's state: sums by lane (16 at most), the peak in the next 16, the output so far.
inline long state_floats(int value_dim) { return 32 + padded(value_dim); }

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

// A matrix product: prepare(begin, end) for all tiles of rows, then multiply(group, begin, end) for all groups of
// channels. Rows are taken in parts that stay in the second-level cache while all groups pass them, so each part reads
// the weights once; with few groups for many threads parts are smaller, down to where they no longer outweigh that.
template <class Prepare, class Multiply>
void linear(int threads, long rows, int tile_rows, long tile_bytes, long channels, int group_channels,
            const Prepare& prepare, const Multiply& multiply) {
    const long tiles = (rows + tile_rows - 1) / tile_rows, groups = (channels + group_channels - 1) / group_channels;
    if (!tiles || !groups) return;
    const long cached = std::max(PART_TILES, PART_BYTES / tile_bytes);
    const long parts = std::max({1L, (tiles + cached - 1) / cached, std::min((tiles + 3) / 4, 4L * threads / groups)});
    std::atomic<long> taken{0};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long tile = 0; tile < tiles; ++tile) prepare(tile, tile + 1);
        for (long i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < groups * parts;) {
            const long part = i / groups;
            multiply(i % groups, tiles * part / parts, tiles * (part + 1) / parts);
        }
    }
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
BG_TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
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
int bg_interface() { return 8; }

// The sizes by which callers cut work and make room, in the order of _sizes_agree() in cpu/__init__.py, which compares
// them with its own; -1 behind the last.
int bg_size(int index) {
    const long sizes[] = {KEY_TILE,        MAX_ROWS, portable::ROWS, ITEM_WORDS,      MAX_DIM,
                          MAX_LINEAR_ROWS, GROUP,    PANEL,          state_floats(1), state_floats(MAX_DIM)};
    return index < static_cast<int>(std::size(sizes)) ? static_cast<int>(sizes[index]) : -1;
}

// The highest level this machine runs.
int bg_best_level() {
#if BG_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? 3 : 2;
#else
    return 0;
#endif
}

// Items are (sequence, KV head, first row, rows, first key, end), as said in items.py; those of a phase start when all
// of those before it are done.
void bg_attention(int level, int threads, int bf16, int pool_bf16, const void* query, long query_token, long query_head,
                  void* out, const void* pool, const int32_t* block_table, long table_row, const int32_t* tokens,
                  long num_live, const int32_t* items, const int32_t* phases, int num_phases, float* states,
                  const float* sinks, int num_heads, int num_kv_heads, int head_dim, int value_dim, int block_size,
                  float scale, float soft_cap, int window, long num_tokens) {
    const Attention work{bf16,
                         query,
                         query_token,
                         query_head,
                         out,
                         static_cast<const uint32_t*>(pool),
                         block_table,
                         table_row,
                         tokens,
                         states,
                         sinks,
                         num_heads,
                         num_kv_heads,
                         head_dim,
                         value_dim,
                         block_size,
                         scale,
                         soft_cap,
                         window};
    const auto kernel = LEVELS[level]->attention[pool_bf16];
    const long row_bytes = static_cast<long>(num_heads) * value_dim * (bf16 ? 2 : 4);
    std::memset(static_cast<char*>(out) + num_live * row_bytes, 0, (num_tokens - num_live) * row_bytes);
    // Items come sorted by cost, the dearest first, so that handing them out one by one evens the threads out. A
    // thread takes its next item before it does the present one, to fetch the next one's first keys meanwhile. No item
    // of a phase is done before all earlier ones are, so that counting those done is enough to know.
    std::atomic<long> taken{0}, done{0};
#pragma omp parallel num_threads(threads)
    {
        int phase = 0;
        const auto take = [&] {
            const long i = taken.fetch_add(1, std::memory_order_relaxed);
            return i < phases[num_phases] ? items + ITEM_WORDS * i : nullptr;
        };
        for (const int32_t *item = take(), *next; item; item = next) {
            next = take();
            while (item >= items + ITEM_WORDS * static_cast<long>(phases[phase + 1])) ++phase;
            while (done.load(std::memory_order_acquire) < phases[phase]) std::this_thread::yield();
            kernel(work, item, next);
            done.fetch_add(1, std::memory_order_release);
        }
    }
}

void bg_rope_and_write(int level, int threads, int bf16, int pool_bf16, void* query, long query_token, long query_head, void* key,
                       long key_token, long key_head, const void* value, long value_token, long value_head,
                       const float* cosine, const float* sine, const int64_t* slots, long num_tokens, void* pool,
                       int num_heads, int num_kv_heads, int head_dim, int value_dim, int rotary_dim, int block_size,
                       int interleaved) {
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
                    value_dim,
                    rotary_dim,
                    block_size,
                    interleaved};
    const auto kernel = LEVELS[level]->rope[pool_bf16][bf16];
    split(threads, num_tokens, 8, [&](long begin, long end) { kernel(work, begin, end); });
}

void bg_rms_norm(int level, int threads, int bf16, const void* x, long x_token, long x_head, const float* weight,
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

void bg_int8_linear(int level, int threads, int bf16, int out_bf16, const void* x, long x_row, const void* weight,
                    const float* scales, const int32_t* sums, const float* bias, void* out, long rows, int in_features,
                    int out_features, int32_t* lanes, float* row_scales) {
    const Int8Linear work{x,   x_row, static_cast<const int32_t*>(weight), scales,       sums,  bias,
                          out, rows,  in_features,                         out_features, lanes, row_scales};
    const Kernels& kernels = *LEVELS[level];
    linear(
        threads, rows, kernels.linear_rows, 4L * work.quads() * kernels.linear_rows * kernels.linear_forms,
        out_features, kernels.linear_channels,
        [&](long begin, long end) { kernels.quantize[bf16](work, begin, end); },
        [&](long group, long begin, long end) { kernels.int8_linear[out_bf16](work, group, begin, end); });
}

void bg_float_linear(int level, int threads, int bf16, int out_bf16, const void* x, long x_row, const void* weight,
                     const void* bias, void* out, long rows, int in_features, int out_features, void* lanes) {
    const FloatLinear work{x, x_row, weight, bias, out, rows, in_features, out_features, lanes};
    const Kernels& kernels = *LEVELS[level];
    linear(
        threads, rows, kernels.float_rows, 4L * work.lanes_of(bf16 ? 2 : 1) * kernels.float_rows,
        out_features, kernels.linear_channels,
        [&](long begin, long end) { kernels.order_rows[bf16](work, begin, end); },
        [&](long group, long begin, long end) { kernels.float_linear[bf16][out_bf16](work, group, begin, end); });
}

}  // extern "C"

#else  // BG_LEVEL: the kernels, compiled once per level

namespace {
namespace BG_NAMESPACE {

#include "vectors.h"
// first: the others are written in its terms
#include "attention.h"
#include "rows.h"
#include "matmul.h"

const Kernels kernels = {
    {attention<Single>, attention<Pairs>},
    {{rope<float, float>, rope<uint16_t, float>}, {rope<float, uint16_t>, rope<uint16_t, uint16_t>}},
    {norm<float>, norm<uint16_t>},
    {gate<float, Silu>, gate<uint16_t, Silu>},
    {gate<float, GeluTanh>, gate<uint16_t, GeluTanh>},
    gumbel,
    {quantize<float>, quantize<uint16_t>},
    {int8_linear<float>, int8_linear<uint16_t>},
    {order_rows<OneInput>, order_rows<TwoInputs>},
    {{float_linear<OneInput, float>}, {float_linear<TwoInputs, float>, float_linear<TwoInputs, uint16_t>}},
    LINEAR_ROWS,
    LINEAR_FORMS,
    FLOAT_ROWS,
    LINEAR_VECTORS * W,
};

}  // namespace BG_NAMESPACE
}  // namespace

#endif  // BG_LEVEL
