// Matrix products at one instruction set. All kinds keep a weight in panels of PANEL output channels, put rows of
// activations in the order in which a register tile reads them, and go panel by panel over as many rows as stay in the
// second-level cache, or twelve tiles where those are too large for it. The first tile of rows asks for the panels
// ahead, into that cache: the first level has no room for as many lines on their way, and reading from memory is a tenth
// slower through it. Every tile asks for the lines that it will write; with AVX-512 a tile's channels are whole lines of
// them where rows of output are, so that no two threads write to one line.
//
// 8-bit integers: weights quantised by output channel, activations by token. A panel is [in_features / 4][PANEL] lanes
// of 4 bytes: a lane is four neighbouring inputs of one channel (inputs and channels padded with zeros). A row of
// activations is quantised once for all channels, symmetric by the largest magnitude of each GROUP of inputs, because a
// few inputs of a language model are many times larger than the rest. A group's sum is a 32-bit integer, small enough
// for a float to hold, so every instruction set and every way of cutting the work multiplies the same numbers.
//
// AVX-512 VNNI multiplies unsigned by signed bytes: there activations are stored with 128 added, and a sum begins at
// minus 128 times the channel's own. Without it both are widened to 16 bits, two inputs of a lane at a time (the even
// and the odd bytes), because the 8-bit products of AVX2 saturate.

constexpr int FAR = 64;  // lanes of a panel that a product asks for ahead
constexpr int LINEAR_ROWS = BG_LEVEL >= 2 ? 6 : 4;  // of a register tile
constexpr int LINEAR_VECTORS = BG_LEVEL >= 2 ? 2 : PANEL / W;  // of a register tile: whole panels
constexpr int LINEAR_FORMS = BG_LEVEL >= 3 ? 1 : 2;  // lanes that four inputs of a row take
static_assert(LINEAR_ROWS <= MAX_LINEAR_ROWS && LINEAR_FORMS <= 2, "callers make room for no more");

#if BG_LEVEL >= 3
inline Ints multiply_bytes(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}
#else
inline Ints even_bytes(Ints x) {  // two signed 16-bit numbers a lane, from bytes 0 and 2
#if BG_LEVEL == 2
    return (Ints)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)x, 8), 8);
#elif BG_LEVEL == 1
    return (Ints)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8);
#else
    return ((x << 24 >> 24) & 0xffff) | (x << 8 >> 24 << 16);
#endif
}

inline Ints odd_bytes(Ints x) {  // from bytes 1 and 3
#if BG_LEVEL == 2
    return (Ints)_mm512_srai_epi16((__m512i)x, 8);
#elif BG_LEVEL == 1
    return (Ints)_mm256_srai_epi16((__m256i)x, 8);
#else
    return ((x << 16 >> 24) & 0xffff) | (x >> 24 << 16);
#endif
}

inline Ints multiply_pairs(Ints a, Ints b) {
#if BG_LEVEL == 2
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif BG_LEVEL == 1
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
#endif

// Quantises the rows of the register tiles [begin, end). A tile is [in_features / 4][LINEAR_ROWS][LINEAR_FORMS] lanes
// and [groups][LINEAR_ROWS] scales.
template <class T>
void quantize(const Int8Linear& a, long begin, long end) {
    typedef int8_t Bytes __attribute__((vector_size(W)));
    constexpr int STEP = LINEAR_ROWS * LINEAR_FORMS;
    for (long row = begin * LINEAR_ROWS; row < std::min(end * LINEAR_ROWS, a.rows); ++row) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_row;
        int32_t* lanes = a.lanes + row / LINEAR_ROWS * a.quads() * STEP + row % LINEAR_ROWS * LINEAR_FORMS;
        float* scales = a.row_scales + row / LINEAR_ROWS * a.groups() * LINEAR_ROWS + row % LINEAR_ROWS;
        for (int g = 0; g < a.groups(); ++g, x += GROUP) {
            const int left = std::min(GROUP, a.in_features - g * GROUP), quads = (left + 3) / 4;
            Floats wide[GROUP / W], most{}, broken{};
            for (int i = 0; i < GROUP / W; ++i) {
                wide[i] = i * W < left ? read(x + i * W, left - i * W) : Floats{};
                most = maximum(most, maximum(wide[i], -wide[i]));
                broken += wide[i] * 0.0f;  // NaN where there is NaN or infinity: such a row's outputs are all NaN
            }
            const float peak = largest(most);
            scales[g * LINEAR_ROWS] = peak / 127.0f + total(broken);
            const Floats inverse = splat(peak > 0 ? 127.0f / peak : 0.0f);
            alignas(64) int8_t bytes[GROUP];
            for (int i = 0; i < GROUP / W; ++i)
                store(bytes + i * W, __builtin_convertvector(nearest(wide[i] * inverse), Bytes));
            for (int q = 0; q < quads; q += W) {
                const Ints four = load<Ints>(bytes + 4 * q);
                alignas(64) int32_t forms[LINEAR_FORMS][W];
#if BG_LEVEL >= 3
                store(forms[0], four ^ static_cast<int32_t>(0x80808080));
#else
                store(forms[0], even_bytes(four));
                store(forms[1], odd_bytes(four));
#endif
                for (int i = 0; i < std::min(W, quads - q); ++i, lanes += STEP)
                    for (int f = 0; f < LINEAR_FORMS; ++f) lanes[f] = forms[f][i];
            }
        }
    }
}

// out[row ...][channel ...] for R rows of one tile and V vectors of channels, whose panels begin at `weight`.
template <class T, int R, int V>
__attribute__((noinline)) void linear_tile(const Int8Linear& a, long row, long channel, const int32_t* weight,
                                           bool ahead) {
    constexpr int STEP = LINEAR_ROWS * LINEAR_FORMS;
    const int quads = a.quads();
    const int32_t* left = a.lanes + row / LINEAR_ROWS * quads * STEP;
    const float* row_scales = a.row_scales + row / LINEAR_ROWS * a.groups() * LINEAR_ROWS;
    const int32_t* right[V];
    for (int v = 0; v < V; ++v) right[v] = weight + v * W / PANEL * static_cast<long>(quads) * PANEL + v * W % PANEL;
    T* out = static_cast<T*>(a.out) + row * a.out_features + channel;
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) __builtin_prefetch(out + static_cast<long>(r) * a.out_features + v * W, 1);
    Floats totals[R][V] = {};
    for (int g = 0, k = 0; g < a.groups(); ++g, row_scales += LINEAR_ROWS) {
        Ints sums[R][V];
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) {
#if BG_LEVEL >= 3
            const Ints first = load<Ints>(a.sums + g * a.padded_channels() + channel + v * W) * -128;
#else
            const Ints first{};
#endif
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) sums[r][v] = first;
        }
        for (const int end = std::min(quads, k + GROUP / 4); k < end; ++k, left += STEP) {
            if (ahead)  // the first tile of rows brings the panels in for the others
                for (int v = 0; v < V; v += PANEL / W) __builtin_prefetch(right[v] + (k + FAR) * PANEL, 0, 2);
            Ints four[V];
#pragma GCC unroll 12
            for (int v = 0; v < V; ++v) four[v] = load<Ints>(right[v] + k * PANEL);
#if BG_LEVEL >= 3
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
                for (int v = 0; v < V; ++v) sums[r][v] = multiply_bytes(sums[r][v], left[r] + Ints{}, four[v]);
#else
            Ints even[V], odd[V];
#pragma GCC unroll 12
            for (int v = 0; v < V; ++v) even[v] = even_bytes(four[v]), odd[v] = odd_bytes(four[v]);
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r) {
                const Ints x = left[2 * r] + Ints{}, y = left[2 * r + 1] + Ints{};
#pragma GCC unroll 12
                for (int v = 0; v < V; ++v) sums[r][v] += multiply_pairs(x, even[v]);
#pragma GCC unroll 12
                for (int v = 0; v < V; ++v) sums[r][v] += multiply_pairs(y, odd[v]);
            }
#endif
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 12
            for (int v = 0; v < V; ++v)
                totals[r][v] = fma(__builtin_convertvector(sums[r][v], Floats), splat(row_scales[r]), totals[r][v]);
#if BG_LEVEL < 2
        asm("" ::"r"(totals) : "memory");  // totals stay in memory, to leave the few registers to the sums
#endif
    }
    for (int v = 0; v < V && channel + v * W < a.out_features; ++v) {
        const long first = channel + v * W, rest = a.out_features - first;
        const Floats scale = load<Floats>(a.scales + first);
        const Floats bias = a.bias ? read(a.bias + first, rest) : Floats{};
        for (int r = 0; r < R; ++r)
            write(out + static_cast<long>(r) * a.out_features + v * W, fma(totals[r][v], scale, bias), rest);
    }
}

// The channels of panel group `group` for the rows of the register tiles [begin, end).
template <class T>
void int8_linear(const Int8Linear& a, long group, long begin, long end) {
    constexpr int PANELS = LINEAR_VECTORS * W / PANEL;
    const int panels = static_cast<int>(std::min<long>(PANELS, a.padded_channels() / PANEL - group * PANELS));
    const int32_t* weight = a.weight + group * PANELS * static_cast<long>(a.quads()) * PANEL;
    for (long tile = begin; tile < end; ++tile) {
        const long row = tile * LINEAR_ROWS;
        choose<LINEAR_ROWS>(static_cast<int>(std::min<long>(LINEAR_ROWS, a.rows - row)), [&](auto rows) {
            choose<PANELS>(panels, [&](auto count) {
                linear_tile<T, rows(), count() * PANEL / W>(a, row, group * LINEAR_VECTORS * W, weight, tile == begin);
            });
        });
    }
}

// ---- float32 and bfloat16: panels are [lanes][PANEL], a tile of rows [lanes][FLOAT_ROWS] -----------------------------

constexpr int FLOAT_ROWS = BG_LEVEL >= 2 ? 12 : BG_LEVEL == 1 ? 6 : 3;
static_assert(FLOAT_ROWS <= MAX_LINEAR_ROWS, "callers make room for no more");

struct OneInput {  // a lane is a float32
    typedef float Number;
    typedef float Lane;
    static constexpr int PER_LANE = 1;

    template <int R, int V>
    static inline void step(Floats (&sums)[R][V], const Lane* left, const Lane* const (&right)[V], long offset) {
        Floats wide[V];
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) wide[v] = load<Floats>(right[v] + offset);
        multiply(sums, wide, [&](int r) { return splat(left[r]); });
    }
    template <int R, int V, class Left>
    static inline void multiply(Floats (&sums)[R][V], const Floats (&wide)[V], const Left& broadcast) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const Floats x = broadcast(r);
#pragma GCC unroll 12
            for (int v = 0; v < V; ++v) sums[r][v] = fma(x, wide[v], sums[r][v]);
        }
    }
};

struct TwoInputs {  // a lane is two neighbouring inputs in bfloat16, the first in its low half
    typedef uint16_t Number;
    typedef uint32_t Lane;
    static constexpr int PER_LANE = 2;

    template <int R, int V>
    static inline void step(Floats (&sums)[R][V], const Lane* left, const Lane* const (&right)[V], long offset) {
#if BG_LEVEL >= 3
        __m512bh wide[V];
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) wide[v] = load<__m512bh>(right[v] + offset);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const __m512bh x = (__m512bh)splat(left[r]);
#pragma GCC unroll 12
            for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, wide[v]);
        }
#else
        Floats wide[V];
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) wide[v] = (Floats)(load<Lanes>(right[v] + offset) << 16);
        OneInput::multiply(sums, wide, [&](int r) { return (Floats)(splat(left[r]) << 16); });
#pragma GCC unroll 12
        for (int v = 0; v < V; ++v) wide[v] = Pairs::high(load<Lanes>(right[v] + offset));
        OneInput::multiply(sums, wide, [&](int r) { return Pairs::high(splat(left[r])); });
#endif
    }
};

// Four lanes of four rows become four rows of each lane.
template <class Number>
inline void transpose(const Number* x, long x_row, uint32_t* to, long stride) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    const Four a = load<Four>(x), b = load<Four>(x + x_row);
    const Four c = load<Four>(x + 2 * x_row), d = load<Four>(x + 3 * x_row);
    const Four ab = shuffle<0, 4, 1, 5>(a, b), cd = shuffle<0, 4, 1, 5>(c, d);
    const Four ba = shuffle<2, 6, 3, 7>(a, b), dc = shuffle<2, 6, 3, 7>(c, d);
    store(to, shuffle<0, 1, 4, 5>(ab, cd));
    store(to + stride, shuffle<2, 3, 6, 7>(ab, cd));
    store(to + 2 * stride, shuffle<0, 1, 4, 5>(ba, dc));
    store(to + 3 * stride, shuffle<2, 3, 6, 7>(ba, dc));
}

template <class Kind>
void order_rows(const FloatLinear& a, long begin, long end) {
    typedef typename Kind::Number Number;
    constexpr int PER_LANE = Kind::PER_LANE;
    const long count = a.lanes_of(PER_LANE), whole = a.in_features / PER_LANE, fours = whole / 4 * 4;
    for (long row = begin * FLOAT_ROWS, last = std::min(end * FLOAT_ROWS, a.rows), some; row < last; row += some) {
        some = std::min(last, row / FLOAT_ROWS * FLOAT_ROWS + FLOAT_ROWS) - row >= 4 ? 4 : 1;
        const Number* x = static_cast<const Number*>(a.x) + row * a.x_row;
        uint32_t* to = static_cast<uint32_t*>(a.lanes) + row / FLOAT_ROWS * count * FLOAT_ROWS + row % FLOAT_ROWS;
        if (some == 4)
            for (long i = 0; i < fours; i += 4) transpose(x + i * PER_LANE, a.x_row, to + i * FLOAT_ROWS, FLOAT_ROWS);
        for (long r = 0; r < some; ++r, ++to, x += a.x_row) {
            for (long i = some == 4 ? fours : 0; i < whole; ++i)
                std::memcpy(to + i * FLOAT_ROWS, x + i * PER_LANE, sizeof *to);
            if (whole < count) {
                to[whole * FLOAT_ROWS] = 0;
                std::memcpy(to + whole * FLOAT_ROWS, x + a.in_features - 1, sizeof *x);
            }
        }
    }
}

template <class Kind, class Out, int R, int V>
__attribute__((noinline)) void float_tile(const FloatLinear& a, long row, long channel,
                                          const typename Kind::Lane* weight, bool ahead) {
    typedef typename Kind::Number Number;
    typedef typename Kind::Lane Lane;
    constexpr int NEAR = 16;  // lanes
    const long count = a.lanes_of(Kind::PER_LANE);
    const Lane* left = static_cast<const Lane*>(a.lanes) + row * count;
    const Lane* right[V];
    for (int v = 0; v < V; ++v) right[v] = weight + v * W / PANEL * count * PANEL + v * W % PANEL;
    Out* out = static_cast<Out*>(a.out) + row * a.out_features + channel;
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) __builtin_prefetch(out + static_cast<long>(r) * a.out_features + v * W, 1);
    Floats sums[R][V] = {};
    for (long k = 0; k < count; ++k, left += FLOAT_ROWS) {
        if (ahead)
            for (int v = 0; v < V; v += PANEL / W) __builtin_prefetch(right[v] + (k + FAR) * PANEL, 0, 2);
        __builtin_prefetch(left + NEAR * FLOAT_ROWS);
        Kind::step(sums, left, right, k * PANEL);
    }
    for (int v = 0; v < V && channel + v * W < a.out_features; ++v) {
        const long first = channel + v * W, rest = a.out_features - first;
        const Floats bias = a.bias ? read(static_cast<const Number*>(a.bias) + first, rest) : Floats{};
        for (int r = 0; r < R; ++r)
            write(out + static_cast<long>(r) * a.out_features + v * W, sums[r][v] + bias, rest);
    }
}

template <class Kind, class Out>
void float_linear(const FloatLinear& a, long group, long begin, long end) {
    typedef typename Kind::Lane Lane;
    constexpr int PANELS = LINEAR_VECTORS * W / PANEL;
    const long all = (a.out_features + PANEL - 1L) / PANEL;
    const int panels = static_cast<int>(std::min<long>(PANELS, all - group * PANELS));
    const Lane* weight = static_cast<const Lane*>(a.weight) + group * PANELS * a.lanes_of(Kind::PER_LANE) * PANEL;
    for (long tile = begin; tile < end; ++tile) {
        const long row = tile * FLOAT_ROWS;
        const long channel = group * LINEAR_VECTORS * W;
        choose<FLOAT_ROWS>(static_cast<int>(std::min<long>(FLOAT_ROWS, a.rows - row)), [&](auto rows) {
            choose<PANELS>(panels, [&](auto count) {
                float_tile<Kind, Out, rows(), count() * PANEL / W>(a, row, channel, weight, tile == begin);
            });
        });
    }
}
