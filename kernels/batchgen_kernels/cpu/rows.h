// What goes over rows of activations, at one instruction set: rope with KV write, norm, gated activations, noise.

// ---- rope and write -------------------------------------------------------------------------------------------------

template <class T>
inline void rotate(T* head, const float* cosine, const float* sine, int rotary_dim, bool interleaved) {
    const int half = rotary_dim / 2;
    if (interleaved) {
        float x[MAX_DIM], y[MAX_DIM];
        for (int i = 0; i < rotary_dim; i += W) write(x + i, read(head + i, rotary_dim - i), rotary_dim - i);
        for (int i = 0; i < half; ++i) {
            y[2 * i] = x[2 * i] * cosine[i] - x[2 * i + 1] * sine[i];
            y[2 * i + 1] = x[2 * i + 1] * cosine[i] + x[2 * i] * sine[i];
        }
        for (int i = 0; i < rotary_dim; i += W) write(head + i, read(y + i, rotary_dim - i), rotary_dim - i);
        return;
    }
    for (int i = 0; i < half; i += W) {
        const Floats x = read(head + i, half - i), y = read(head + half + i, half - i);
        const Floats c = read(cosine + i, half - i), s = read(sine + i, half - i);
        write(head + i, x * c - y * s, half - i);
        write(head + half + i, y * c + x * s, half - i);
    }
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
    uint16_t* row = reinterpret_cast<uint16_t*>(lanes + static_cast<long>(at / 2) * width);
    int d = 0;
#if BG_LEVEL >= 2
    for (; d + W <= dim; d += W) {
        const __m512i wide = (__m512i)(__builtin_convertvector(load<Halves>(value + d), Lanes) << (at % 2 * 16));
        _mm512_mask_storeu_epi16(row + 2 * d, at % 2 ? 0xaaaaaaaa : 0x55555555, wide);
    }
#endif
    for (; d < dim; ++d) row[2 * d + at % 2] = value[d];
}

// A row as the pool's numbers: itself, or rounded or widened in `buffer`.
template <class T>
inline const T* as_numbers(const T* row, int, T*) {
    return row;
}

template <class P, class T>
inline const P* as_numbers(const T* row, int dim, P* buffer) {
    for (int i = 0; i < dim; i += W) write(buffer + i, read(row + i, dim - i), dim - i);
    return buffer;
}

// Asks for the lines of the pool that a token is about to be written to: a key's are all over its block.
template <class P>
inline void fetch_slot(const Rope& a, long lanes, int64_t slot) {
    constexpr int PER_LANE = 4 / sizeof(P);
    if (slot < 0) return;
    const int at = static_cast<int>(slot % a.block_size), width = padded(a.value_dim), rows = a.head_dim / PER_LANE;
    for (int h = 0; h < a.num_kv_heads; ++h) {
        const uint32_t* head = a.pool + (slot / a.block_size * a.num_kv_heads + h) * lanes;
        for (int d = 0; d < rows; ++d) __builtin_prefetch(head + static_cast<long>(d) * a.block_size + at, 1);
        const uint32_t* values = head + static_cast<long>(a.block_size) * rows + at / PER_LANE * width;
        for (int d = 0; d < width; d += 16) __builtin_prefetch(values + d, 1);
    }
}

// T the activations' numbers, P the pool's.
template <class T, class P>
void rope(const Rope& a, long begin, long end) {
    const int dim = a.head_dim, value_dim = a.value_dim, width = padded(value_dim), per_lane = sizeof(P) == 2 ? 2 : 1;
    P buffer[MAX_DIM];
    const long lanes = head_lanes(a.block_size, dim, value_dim, per_lane == 2);
    if (begin < end) fetch_slot<P>(a, lanes, a.slots[begin]);
    for (long t = begin; t < end; ++t) {
        if (t + 1 < end) fetch_slot<P>(a, lanes, a.slots[t + 1]);
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
            const T* value = static_cast<const T*>(a.value) + t * a.value_token + h * a.value_head;
            write_key(as_numbers(key, dim, buffer), dim, head, a.block_size, at);
            write_value(as_numbers(value, value_dim, buffer), value_dim,
                        head + static_cast<long>(a.block_size) * dim / per_lane, width, at);
        }
    }
}

// ---- rows: norm, gated activations, noise ------------------------------------------------------------------------

template <class T>
void norm(const Norm& a, long begin, long end) {
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
            write(out + i, read(a.weight + i, a.dim - i) * v, a.dim - i);
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
    return shuffle<(I % 2 * W + Half * W / 2 + I / 2)...>(a, b);
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
