// Paged attention at one instruction set.
//
// The KV pool. A block holds block_size tokens; for one block and one KV head the keys come first, then the values,
// both as rows of 4-byte lanes (padded_dim = value_dim rounded up to 16, the padding zero):
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

// ---- the product: rows x vectors of sums ------------------------------------------------------------------------

// Keeps a vector in its register: the compiler would rather load it again for every row.
template <class V>
inline V pinned(V v) {
#if BG_LEVEL >= 2
    asm("" : "+v"(v));
#elif BG_LEVEL == 1
    asm("" : "+x"(v));
#endif
    return v;
}

// With AVX2, few rows (one of a decode) leave registers for wider tiles, where rows rather than vectors are held: six
// sums would wait for each other.
constexpr bool few(int rows) { return BG_LEVEL == 1 && rows <= 3; }
constexpr int vectors_of(int rows) { return few(rows) ? 4 : VECTORS; }

// sums += broadcast elements of R rows x the V vectors that right(v) loads.
template <int R, int V, class Left, class Load>
inline void multiply_add(Floats (&sums)[R][V], const Left* left, int stride, const Load& right) {
    if constexpr (few(R)) {
        Floats x[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) x[r] = splat(left[r * stride]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const Floats y = pinned(right(v));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][v] = fma(x[r], y, sums[r][v]);
        }
    } else {
        Floats y[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) y[v] = pinned(right(v));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Floats x = splat(left[r * stride]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = fma(x, y[v], sums[r][v]);
        }
    }
}

// How one broadcast element of a row meets V vectors of lanes, at from(v). `Left` is what rows are packed as, PER_LANE
// how many numbers a lane of the pool holds, PER_STEP how many Left elements one lane takes, STRIDE elements from row
// to row.

struct Single {  // float32
    typedef float Left;
    static constexpr int PER_LANE = 1, PER_STEP = 1, STRIDE = MAX_DIM;

    template <int R, int V, class From>
    static inline void step(Floats (&sums)[R][V], const Left* left, const From& from) {
        multiply_add(sums, left, STRIDE, [&](int v) { return load<Floats>(from(v)); });
    }
    template <class T>
    static inline void pack(const T* from, int n, Left* to) {
        for (int i = 0; i < n; i += W) store(to + i, read(from + i, n - i));
    }
    static inline void pack(Floats first, Floats second, Left* to) {
        store(to, first);
        store(to + W, second);
    }
};

#if BG_LEVEL >= 3
struct Pairs {  // bfloat16 by the pairwise dot product
    typedef uint32_t Left;
    static constexpr int PER_LANE = 2, PER_STEP = 1, STRIDE = MAX_DIM / 2;

    template <int R, int V, class From>
    static inline void step(Floats (&sums)[R][V], const Left* left, const From& from) {
        __m512bh y[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) y[v] = pinned(load<__m512bh>(from(v)));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512bh x = (__m512bh)splat(left[r * STRIDE]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, y[v]);
        }
    }
    static inline void pack(const uint16_t* from, int n, Left* to) { std::memcpy(to, from, n * sizeof(uint16_t)); }
    static inline void pack(const float* from, int n, Left* to) {
        for (int i = 0; i < n; i += W) store(reinterpret_cast<uint16_t*>(to) + i, halves(read(from + i, n - i)));
    }
    static inline void pack(Floats first, Floats second, Left* to) { store(to, _mm512_cvtne2ps_pbh(second, first)); }
};
#else
struct Pairs {  // bfloat16 widened: a lane's low half is its first number, its high half the second
    typedef float Left;
    static constexpr int PER_LANE = 2, PER_STEP = 2, STRIDE = MAX_DIM;

    template <int R, int V, class From>
    static inline void step(Floats (&sums)[R][V], const Left* left, const From& from) {
        multiply_add(sums, left, STRIDE, [&](int v) { return (Floats)(load<Lanes>(from(v)) << 16); });
        multiply_add(sums, left + 1, STRIDE, [&](int v) { return high(load<Lanes>(from(v))); });
    }
    static inline Floats high(Lanes lanes) {
#if BG_LEVEL == 1
        return (Floats)(pinned(lanes >> 16) << 16);  // no register is left for a mask
#else
        return (Floats)(lanes & 0xffff0000u);
#endif
    }
    template <class T>
    static inline void pack(const T* from, int n, Left* to) {
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
    for (int line = 0; line < PIECE; line += 16) __builtin_prefetch(piece + line, 0, 2);
}

// The first LEAD pieces of `count` blocks that are read side by side.
inline void list_pieces(const uint32_t* const* blocks, int count, const uint32_t** pieces) {
    for (int i = 0, offset = 0; i < LEAD; offset += PIECE)
        for (int b = 0; b < count && i < LEAD; ++b) pieces[i++] = blocks[b] + offset;
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
                for (int v = 0; v < V; v += 16 / W) __builtin_prefetch(keys[v] + (k + LEAD) * stride, 0, 2);
        }
        E::step(sums, left + k * E::PER_STEP, [&](int v) { return keys[v] + k * stride; });
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
            E::step(sums, left + k * E::PER_STEP, [&](int v) { return values + k * stride + v * W; });
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
    int sequence, kv_head, first, rows, begin, end, group, window;
    const int32_t* tokens;

    Item(const Attention& a, const int32_t* item)
        : sequence(item[0]),
          kv_head(item[1]),
          first(item[2]),
          rows(item[3]),
          begin(item[4]),
          end(item[5]),
          group(a.num_heads / a.num_kv_heads),
          window(a.window),
          tokens(a.tokens) {}

    int place(int row) const { return (first + row) / group; }
    int token(int row) const { return tokens[2 * place(row)]; }
    int head(int row) const { return kv_head * group + (first + row) % group; }
    int keys_begin(int row) const { return window > 0 ? std::max(0, keys_end(row) - window) : 0; }
    int keys_end(int row) const { return end ? end : tokens[2 * place(row) + 1]; }
    int tiles_begin() const { return begin ? begin : keys_begin(0) / KEY_TILE * KEY_TILE; }
    float* state(const Attention& a, int row) const {
        return a.states + (static_cast<long>(place(row)) * a.num_heads + head(row)) * state_floats(a.value_dim);
    }

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
        constexpr int V = vectors_of(R);
        const uint32_t *keys[KEY_TILE / W], *next[LEAD];
        for (int i = v; i < end; ++i) keys[i] = blocks[i * W / block] + i * W % block;
        for (; v + V < end; v += V) {
            if (ahead) {
                const int b = (v + V) * W / block, rest = (end * W - 1) / block + 1 - b;
                list_pieces(blocks + b, std::min(rest, blocks_per_call(block)), next);
            }
            score<E, R, V>(queries, keys + v, block, steps, ahead ? next : nullptr, scores + v * W);
        }
        choose<V>(end - v, [&](auto vectors) {
            score<E, R, vectors()>(queries, keys + v, block, steps, ahead ? pieces : nullptr, scores + v * W);
        });
    }

    // Adds what the keys [key, end) give; `block_keys` is the lanes of a block's keys, `width` those of a value row.
    template <int R>
    void add_values(int key, int end, int block, long block_keys, int width, bool ahead, float* out) {
        constexpr int V = vectors_of(R);
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
        for (int c = 0; c < width; c += V * W, fetched = nullptr)
            choose<V>(std::min(V, (width - c) / W), [&](auto vectors) {
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
        const Floats change = exp2_below_128(splat(before - peak));
        decay[r] = change[0];
        Floats added = sum * change;
        for (int v = first; v < end; v += 2) {
            Floats weight[2] = {};
            for (int i = 0; i < 2 && v + i < end; ++i) {
                weight[i] = exp2_below_128(fma(load<Floats>(row + (v + i) * W), splat(factor), splat(-peak)));
                added += weight[i];
            }
            E::pack(weight[0], weight[1], weights + r * E::STRIDE + v * W * E::PER_STEP / E::PER_LANE);
        }
        sum = added;
    }
};

// What a row's weights, `sum` in units of 2 ** peak, are to be multiplied by where a sink takes part in the softmax.
// Whichever of the two is larger is the unit, so that nothing overflows.
inline float share_beside(float sink, float sum, float peak) {
    const float logit = sink * LOG2_E, top = std::max(peak, logit);
    const float kept = std::exp2(peak - top);
    return kept / (sum * kept + std::exp2(logit - top));
}

template <class E>
void attention(const Attention& a, const int32_t* item_words, const int32_t* next_words) {
    const Item item(a, item_words);
    const int dim = a.head_dim, value_dim = a.value_dim, width = padded(value_dim);
    const int block = a.block_size, steps = dim / E::PER_LANE;
    const long lanes = head_lanes(block, dim, value_dim, E::PER_LANE == 2);
    const long block_keys = static_cast<long>(block) * steps;
    const float factor = a.soft_cap > 0 ? LOG2_E : LOG2_E * a.scale;

    alignas(64) typename E::Left queries[MAX_ROWS * E::STRIDE];
    alignas(64) float outputs[MAX_ROWS * MAX_DIM];
    Floats sums[MAX_ROWS];
    float peaks[MAX_ROWS];
    Tile<E> tile;
    for (int r = 0; r < item.rows; ++r) {
        const long query = item.token(r) * a.query_token + item.head(r) * a.query_head;
        if (a.bf16)
            E::pack(static_cast<const uint16_t*>(a.query) + query, dim, queries + r * E::STRIDE);
        else
            E::pack(static_cast<const float*>(a.query) + query, dim, queries + r * E::STRIDE);
        if (item.begin) {
            const float* state = item.state(a, r);
            sums[r] = load<Floats>(state);
            peaks[r] = state[16];
            std::memcpy(outputs + r * width, state + 32, sizeof(float) * width);
        } else {
            sums[r] = Floats{};
            peaks[r] = -1e30f;  // finite, so that a tile without a key for this row changes nothing
            std::memset(outputs + r * width, 0, sizeof(float) * width);
        }
    }

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
        if (item.end) {
            float* state = item.state(a, r);
            store(state, sums[r]);
            state[16] = peaks[r];
            std::memcpy(state + 32, outputs + r * width, sizeof(float) * width);
            continue;
        }
        const long out = (static_cast<long>(item.token(r)) * a.num_heads + item.head(r)) * value_dim;
        const Floats share = splat(a.sinks ? share_beside(a.sinks[item.head(r)], total(sums[r]), peaks[r])
                                           : 1.0f / total(sums[r]));
        for (int d = 0; d < value_dim; d += W) {
            const Floats result = load<Floats>(outputs + r * width + d) * share;
            if (a.bf16)
                write(static_cast<uint16_t*>(a.out) + out + d, result, value_dim - d);
            else
                write(static_cast<float*>(a.out) + out + d, result, value_dim - d);
        }
    }
}
