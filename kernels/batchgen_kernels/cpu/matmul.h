// Products of 8-bit integers at one instruction set: weights quantised by output channel, activations by token.
//
// A weight comes in panels of PANEL output channels, each [in_features / 4][PANEL] lanes of 4 bytes: a lane is four
// neighbouring inputs of one channel (inputs and channels padded with zeros). A row of activations is quantised once
// for all channels, symmetric by its largest magnitude, into lanes of the same four inputs. Sums are 32-bit integers,
// so every instruction set and every way of cutting the work gives the same bits.
//
// AVX-512 VNNI multiplies unsigned by signed bytes: there activations are stored with 128 added, and 128 times the
// channel's sum is taken off in the end. Without it both are widened to 16 bits, two inputs of a lane at a time (the
// even and the odd bytes), because the 8-bit products of AVX2 saturate.

constexpr int LINEAR_ROWS = BG_LEVEL >= 2 ? 8 : 4;  // of a register tile
constexpr int LINEAR_VECTORS = BG_LEVEL >= 2 ? 3 : PANEL / W;  // of a register tile: whole panels
constexpr int LINEAR_FORMS = BG_LEVEL >= 3 ? 1 : 2;  // lanes that four inputs of a row take

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

// Quantises the rows of the register tiles [begin, end). A tile is [in_features / 4][LINEAR_ROWS][LINEAR_FORMS] lanes.
template <class T>
void quantize(const Int8Linear& a, long begin, long end) {
    typedef int8_t Bytes __attribute__((vector_size(W)));
    constexpr int STEP = LINEAR_ROWS * LINEAR_FORMS;
    for (long row = begin * LINEAR_ROWS; row < std::min(end * LINEAR_ROWS, a.rows); ++row) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_row;
        Floats most{}, broken{};
        for (int i = 0; i < a.in_features; i += W) {
            const Floats v = read(x + i, a.in_features - i);
            most = maximum(most, maximum(v, -v));
            broken += v * 0.0f;  // NaN where there is NaN or infinity: such a row's outputs are all NaN
        }
        const float peak = largest(most);
        a.row_scales[row] = peak / 127.0f + total(broken);
        const Floats inverse = splat(peak > 0 ? 127.0f / peak : 0.0f);
        int32_t* lanes = a.lanes + row / LINEAR_ROWS * a.quads() * STEP + row % LINEAR_ROWS * LINEAR_FORMS;
        for (int first = 0; first < a.in_features; first += 4 * W) {
            alignas(64) int8_t bytes[4 * W];
            for (int j = 0; j < 4 * W; j += W) {
                const long left = a.in_features - first - j;
                const Floats v = left > 0 ? read(x + first + j, left) : Floats{};
                store(bytes + j, __builtin_convertvector(nearest(v * inverse), Bytes));
            }
            const Ints quads = load<Ints>(bytes);
            alignas(64) int32_t forms[LINEAR_FORMS][W];
#if BG_LEVEL >= 3
            store(forms[0], quads ^ static_cast<int32_t>(0x80808080));
#else
            store(forms[0], even_bytes(quads));
            store(forms[1], odd_bytes(quads));
#endif
            const int count = std::min(W, a.quads() - first / 4);
            for (int q = 0; q < count; ++q)
                for (int f = 0; f < LINEAR_FORMS; ++f) lanes[(first / 4 + q) * STEP + f] = forms[f][q];
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
    const int32_t* right[V];
    for (int v = 0; v < V; ++v) right[v] = weight + v * W / PANEL * static_cast<long>(quads) * PANEL + v * W % PANEL;
    Ints sums[R][V] = {};
    for (int k = 0; k < quads; ++k, left += STEP) {
        if (ahead)  // the first tile of rows brings the panels in for the others
            for (int v = 0; v < V; v += PANEL / W) __builtin_prefetch(right[v] + (k + LEAD) * PANEL);
        Ints four[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) four[v] = load<Ints>(right[v] + k * PANEL);
#if BG_LEVEL >= 3
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = multiply_bytes(sums[r][v], left[r] + Ints{}, four[v]);
#else
        Ints even[V], odd[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) even[v] = even_bytes(four[v]), odd[v] = odd_bytes(four[v]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Ints x = left[2 * r] + Ints{}, y = left[2 * r + 1] + Ints{};
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] += multiply_pairs(x, even[v]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] += multiply_pairs(y, odd[v]);
        }
#endif
    }
    for (int v = 0; v < V && channel + v * W < a.out_features; ++v) {
        const long first = channel + v * W, rest = a.out_features - first;
        const Floats scale = load<Floats>(a.scales + first);
        const Floats bias = a.bias ? read(a.bias + first, rest) : Floats{};
        for (int r = 0; r < R; ++r) {
#if BG_LEVEL >= 3
            sums[r][v] -= load<Ints>(a.sums + first) * 128;
#endif
            const Floats wide = __builtin_convertvector(sums[r][v], Floats) * a.row_scales[row + r];
            T* out = static_cast<T*>(a.out) + (row + r) * a.out_features + first;
            write(out, fma(wide, scale, bias), rest);
        }
    }
}

// The channels of panel group `group` for the rows of the register tiles [begin, end).
template <class T>
void int8_linear(const Int8Linear& a, long group, long begin, long end) {
    constexpr int PANELS = LINEAR_VECTORS * W / PANEL;
    const int panels = static_cast<int>(std::min<long>(PANELS, (a.out_features + PANEL - 1) / PANEL - group * PANELS));
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
