// Vectors of W lanes at one instruction set: arithmetic, exponentials, reading and writing of either dtype.

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

#if BG_LEVEL == 1
inline float largest(Floats v) {
    __m128 best = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    best = _mm_max_ps(best, _mm_movehl_ps(best, best));
    return _mm_cvtss_f32(_mm_max_ss(best, _mm_movehdup_ps(best)));
}
#elif BG_LEVEL == 0
inline float largest(Floats v) {
    float best = v[0];
    for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
    return best;
}
#endif

#if BG_LEVEL < 2

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

// To the nearest whole number, to even from half way; of magnitudes below 2 ** 22.
inline Ints nearest(Floats x) {
#if BG_LEVEL >= 2
    return (Ints)_mm512_cvtps_epi32(x);
#elif BG_LEVEL == 1
    return (Ints)_mm256_cvtps_epi32(x);
#else
    return (Ints)(x + 12582912.0f) - 0x4b400000;  // 1.5 * 2 ** 23 leaves it in the low bits
#endif
}

// 2 ** x for x in [-0.5, 0.5].
inline Floats exp2_fraction(Floats x) {
    Floats y = fma(splat(1.3265226493e-3f), x, splat(9.6712317089e-3f));
    y = fma(y, x, splat(5.5507284767e-2f));
    y = fma(y, x, splat(2.4022248128e-1f));
    y = fma(y, x, splat(6.9314698601e-1f));
    return fma(y, x, splat(1.0f));
}

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
    const Floats y = exp2_fraction(x - whole);
#if BG_LEVEL >= 2
    return _mm512_scalef_ps(y, whole);
#else
    const Floats scaled = (Floats)((Lanes)y + ((Lanes)shifted << 23));
    return x < -126.0f ? Floats{} : x < 128.0f ? scaled : x + splat(INFINITY);
#endif
}

// 2 ** x for x up to 127, where AVX2 can do without half of the instructions of exp2; a NaN stays one.
inline Floats exp2_below_128(Floats x) {
#if BG_LEVEL >= 2
    return exp2(x);
#else
    x = maximum(splat(-127.0f), x);
    const Floats magic = splat(12582912.0f + 127.0f);  // leaves the exponent's bits; those of -127 are zero's
    const Floats shifted = x + magic;
    return exp2_fraction(x - (shifted - magic)) * (Floats)((Lanes)shifted << 23);
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

// Lanes by number, those of `b` behind those of `a`.
template <int... I, class V>
inline V shuffle(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, I...);
#else
    constexpr int N = sizeof...(I);
    return V{(I < N ? a[I % N] : b[I % N])...};
#endif
}

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
