// One engine step of a llama-shaped decoder, run by a team of threads that meet at barriers between phases, and the C interface.
//
// Shapes: T tokens of the step, S sequences, L wanted rows, H hidden, Q = heads * head_dim, KV = kv_heads * head_dim.
// Weights and batch arrays belong to the caller; the model owns its work buffers and the caches.
// Compiled once per instruction set (see build.py): -DKARUI_AVX512, -DKARUI_AVX2 or neither.
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>

#include "attention.h"
#include "medusa.h"
#include "kivi.h"
#include "latent_int8.h"
#include "mixture.h"
#include "sampling.h"
#include "spill.h"
#include "threads.h"

// ---- interface structures, mirrored in karui/kernels/native/library.py ------------------------------------------------------------

struct Layer {
    Linear q, k, v, o, gate, up, down;
    const float *input_norm, *post_norm;                    // in front of attention and feed-forward part, or null
    const float *q_norm, *k_norm;                           // [head_dim], with row_norm [heads * head_dim]; or null
    const float *attended_norm, *fed_norm;                  // behind them, before they are added to the residual stream; or null
    const float *o_norm, *down_norm;                        // of what o and down read; or null
    int64_t rope;                                           // 0: none, 1: by inv_freq, 2: by local_inv_freq
    int64_t window;                                         // keys a row sees, itself included; 0: all
    int64_t spilled_at, spilled_bytes;                      // in the file; 0 bytes: in memory. Of a spilled layer's linears the
                                                            // pointers are offsets in its part of the file
    const Mixture* mixture;                                 // in place of gate, up and down; or null
    const float* sinks;                                     // [heads] logits that take a share of each query's attention; or null
    // Or null. Else q makes queries of what latent->down makes, or of the hidden state where it is empty, k the latent and its rotated key
    // [rank + rope], and v is empty.
    const Latent* latent;
};
struct Config {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, max_threads;
    int32_t rotary_dim;      // how much of a head is rotated
    int32_t row_norm;        // 1: queries (keys) are normalized over all heads together
    int32_t activation;
    int32_t centred;         // 1: norms of the residual stream take the mean off first
    int32_t parallel;        // 1: the feed-forward part reads what the attention reads
    int32_t norm_turned;     // 1: queries and keys are normalized behind the rotation
    float eps, rope_factor;  // rope_factor multiplies cos and sin of inv_freq
    float embed_scale, query_scale, residual_scale, logit_factor;  // factors; residual_scale: on what is added to the residual stream
    float attention_cap, logit_cap;                                // scores and logits x become cap tanh(x / cap); 0: they stay
    const float* inv_freq;   // [rotary_dim / 2]
    const float* local_inv_freq;  // the same, or null
    const float* final_norm;
    const Linear* embedding;
    const Linear* head;
    const Layer* layer;      // [layers]
    int64_t file;            // descriptor of the spilled layers' file, see spill.h
};
struct Batch {
    int32_t tokens_n, sequences, table_width, wanted, aux_n, block_size, groups, padding;
    // slots [groups, T] and block_tables [groups, S, table_width]: of each group of layers, see karui/inference/cache/groups.py
    const int32_t *tokens, *positions, *slots, *query_starts, *context_lens, *block_tables, *rows;
    const uint8_t* const* tree;  // null, or per sequence null or [q, q]
    const int32_t* adapters;     // null or [S]
    const int32_t* aux_layers;
    const float *cosine, *sine;  // [T, rotary_dim / 2] or null: computed from inv_freq
    float *logits, *hidden, *aux;
};
struct Lora {                    // y = row_scale * (W x + b a x) + bias; rank 0 leaves the module alone
    int32_t rank, padding;
    const float *a, *b;          // a [rank, k], b [rank, n] with the adapter's scale folded in
    const float* row_scale;      // [n] or null for ones
};

constexpr int OWN_ROWS = 2;  // up to so many rows every thread computes norms and codes itself instead of waiting for the others'
constexpr int TARGETS = 8;  // q, k, v, o, gate, up, down, down of a latent; of a latent v is W_UK and W_UV together

// ---- work buffers ---------------------------------------------------------------------------------------------------------------

template <typename X> struct Buffer {  // 64-byte aligned, zeroed when it grows, never shrinks
    X* data = nullptr;
    size_t size = 0;
    X* need(size_t n) {
        n += 64;
        if (n > size) {
            free(data);
            size_t bytes = (n * sizeof(X) + 4095) / 4096 * 4096;
            data = (X*)aligned_alloc(4096, bytes);
            if (data) memset((void*)data, 0, bytes);
            size = data ? n : 0;
        }
        return data;
    }
    ~Buffer() { free(data); }
};

struct Pages {  // zeroed memory on huge pages where the system gives them (see arena.py); untouched pages cost nothing
    static constexpr size_t AT_ONCE = 64 << 20;  // taken when asked for: the first touch of 2 MB may cost milliseconds on a virtual machine
    char* data = nullptr;
    size_t size = 0;
    bool need(size_t n) {
        release();
#if defined(__linux__)
        const size_t huge = 2 << 20;
        size = (n + huge - 1) / huge * huge + huge;
        mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) { mapped = nullptr; return false; }
        madvise(mapped, size, MADV_HUGEPAGE);
        data = (char*)(((uintptr_t)mapped + huge - 1) / huge * huge);
#ifdef MADV_POPULATE_WRITE
        madvise(data, std::min(n, AT_ONCE), MADV_POPULATE_WRITE);
#endif
#else
        mapped = calloc(n + 64, 1);
        data = (char*)(((uintptr_t)mapped + 63) / 64 * 64);
#endif
        return mapped != nullptr;
    }
    void release() {
#if defined(__linux__)
        if (mapped) munmap(mapped, size);
#else
        free(mapped);
#endif
        mapped = data = nullptr;
    }
    ~Pages() { release(); }

private:
    void* mapped = nullptr;
};

struct Codes {  // int8 activations of one phase for one (block, per_token, factor)
    Buffer<int8_t> codes;
    Buffer<float> scale;
    Buffer<int32_t> sum;
};

struct Inputs {  // what the linears of a phase read
    Buffer<float> normed, mixed, ranked;
    Codes coded[4];
};

struct IndexItem { int32_t sequence, first, rows, from, to; int64_t ld, scores; };  // rows' scores of keys [from, to); scores < 0: see plan_index

struct Item { int32_t sequence, first, rows, kv_head, chunk, partial; };  // chunk < 0: all chunks, result written directly

struct Scratch {  // per thread
    Buffer<float> panel, out, run;
    Buffer<Partial> partial, running;
    Buffer<const float*> query;
    Buffer<int> from, to;
    Gathered gathered;
    int upcoming = 0;            // item that this thread computes next
    const void* coming = nullptr;  // where the values lie that it has asked for
    Buffer<float> rows;  // of latents
    Buffer<float> scores, index_keys;  // of an indexer
    std::vector<int32_t> slots;
    RoundedQueries rounded;
    LatentWork latent;
};

struct Model {
    Config c;
    int dim_padded, ld_hidden, ld_inter, ld_q, ld_mixed, ld_ranked;
    int key_width, out_width;   // of a query as the attention reads it, and of what it returns
    const Latent* latent;       // of the first layer, for its sizes, which all layers share; null: keys and values of heads are cached
    Team team;
    struct Place { int32_t group, number; };
    std::vector<Place> places;  // of each layer: its group, and its number within it; a block holds as many layers as the largest has
    int groups = 1;
    std::vector<Cache> cache;   // by that number; of a KIVI cache the fp16 pages
    std::vector<Coded> coded;   // empty for other caches
    std::vector<LatentCache> latents;  // in place of `cache`
    std::vector<IndexCache> index;     // beside `latents` where a layer has an indexer
    const Indexer* indexer;            // of the first layer, for its sizes; null: there is none
    int top = 0;                       // keys that a row attends to at most; 0: all
    PageTable table;
    std::vector<int32_t> filled;  // slots that end a block and that the step writes
    Pages pages;
    int64_t slots = 0;
    std::vector<Scratch*> scratch;
    std::vector<Lora> loras;  // [slot][layer][target]
    int lora_slots = 0;
    int max_padded = 0;

    Buffer<float> h, q, kv, gate, up, cosine, sine, local_cosine, local_sine, low, product, rms, low_query, weighted, index_query, index_key, index_weight, index_scores;
    Buffer<int32_t> chosen;  // [T, top] slots; of rows that see more than `top` keys
    std::vector<IndexItem> index_items;
    std::atomic<int> next_index{0};
    std::vector<Inputs*> inputs;  // [0] for all; with few rows every thread computes its own, which saves the barrier after
    bool own = false;
    bool aside = false;  // some products go through a buffer on their way to the residual stream
    std::vector<Item> items;
    std::vector<int> cut_items;  // the first of each of those that are cut by chunk
    Buffer<float> split_out;
    Buffer<Partial> split;
    std::atomic<int> next{0};
    bool any_split = false;
    int merge_first = 0;
    const Batch* b = nullptr;
    struct Best { float value, spoilt; int32_t token; };
    std::vector<Best> best;  // [threads, L]: of the columns that a thread computed; spoilt: NaN where a value is no number, or infinite
    bool want_best = false;
    Buffer<float> logits, hidden, aux;  // of rounds.h
    RowCosts costs;
    Drafting drafting;
    MedusaDrafting medusa;
    Mixing mixing;
    std::vector<const Mixture*> mixtures;  // of each layer
    Spill spill;
    bool ready = false;

    explicit Model(const Config& config) : team(config.max_threads) {
        for (int i = 0; i < team.size(); i++) { scratch.push_back(new Scratch); inputs.push_back(new Inputs); }
        ready = configure(config);
    }
    // Takes new weights of the same shapes; the caches stay. False: no memory for the buffers of spilled layers.
    bool configure(const Config& config) {
        c = config;
        max_padded = 0;
        aside = c.residual_scale != 1.0f;
        for (int l = 0; l < c.layers; l++) aside |= c.layer[l].attended_norm || c.layer[l].fed_norm;
        dim_padded = round_up(c.head_dim, 16);
        ld_hidden = round_up(c.hidden, 32);
        ld_inter = round_up(c.intermediate, 32);
        latent = c.layer[0].latent;
        indexer = latent ? latent->indexer : nullptr;
        top = latent ? (int)latent->top : 0;
        key_width = latent ? latent->width() : dim_padded;
        out_width = latent ? latent->rank_padded() : dim_padded;
        ld_q = round_up(c.heads * key_width, 32);
        ld_mixed = latent ? 0 : ld_q;
        ld_ranked = latent ? round_up(latent->query_rank, 32) : 0;
        auto fit = [&](int& ld, const Linear& w) {  // rows are as long as the widest padding that reads them
            ld = std::max(ld, w.k_padded);
            max_padded = std::max(max_padded, w.k_padded);
        };
        fit(ld_hidden, *c.head);
        for (int l = 0; l < c.layers; l++) {
            const Layer& y = c.layer[l];
            for (const Linear* w : {&y.k, &y.v, &y.gate, &y.up}) fit(ld_hidden, *w);
            fit(y.latent && y.latent->query_rank ? ld_ranked : ld_hidden, y.q);
            if (y.latent) fit(ld_hidden, y.latent->down);
            if (y.latent && y.latent->indexer) {
                fit(ld_ranked, y.latent->indexer->q);
                for (const Linear* w : {&y.latent->indexer->k, &y.latent->indexer->weights}) fit(ld_hidden, *w);
            }
            fit(ld_mixed, y.o);
            fit(ld_inter, y.down);
            if (!y.mixture) continue;
            const Mixture& m = *y.mixture;
            fit(ld_hidden, *m.router);
            for (int i = 0; i < 3 * (m.experts + m.shared); i++) if (i % 3 < 2) fit(ld_hidden, m.expert[i]);
            max_padded = std::max(max_padded, mixing.max_padded(m));
        }
        for (Scratch* s : scratch) s->panel.need((size_t)max_padded * PANEL);
        mixtures.clear();
        for (int l = 0; l < c.layers; l++) if (c.layer[l].mixture) mixtures.assign(c.layers, nullptr);
        for (int l = 0; l < (int)mixtures.size(); l++) mixtures[l] = c.layer[l].mixture;
        std::vector<Spill::Place> places;
        for (int l = 0; l < c.layers; l++)
            if (c.layer[l].spilled_bytes) places.push_back({c.layer[l].spilled_at, c.layer[l].spilled_bytes});
        return spill.start((int)c.file, std::move(places));
    }
    // The layer with its pointers into what was read of it.
    static Layer placed(const Layer& spilled, const char* at) {
        Layer y = spilled;
        for (Linear* w : {&y.q, &y.k, &y.v, &y.o, &y.gate, &y.up, &y.down}) {
            auto move = [&](auto*& p) { if (p) p = (std::remove_reference_t<decltype(p)>)(at + (intptr_t)p); };
            move(w->codes), move(w->scales), move(w->zeros), move(w->bias), move(w->table);
        }
        return y;
    }
    ~Model() {
        free_cache();
        for (Scratch* s : scratch) delete s;
        for (Inputs* i : inputs) delete i;
    }

    void free_cache() {
        pages.release();
        cache.clear();
        coded.clear();
        latents.clear();
        index.clear();
        table.size = 0;
    }
    // `block` and `staged`, tokens of a block and how many may be unfinished at once, are for KIVI. of: [layers] the place of each.
    bool allocate(int64_t count, int type, int block, int staged, const Place* of) {
        free_cache();
        slots = count;
        places.assign(of, of + c.layers);
        groups = 1;
        int size = 1;  // layers of a block
        for (const Place& p : places) groups = std::max(groups, p.group + 1), size = std::max(size, p.number + 1);
        if (latent) return allocate_latents(type, size);
        int64_t before = 0;
        if (type == CACHE_KIVI4 || type == CACHE_KIVI2) {
            Coded own = {nullptr, type == CACHE_KIVI4 ? 4 : 2, c.kv_heads, c.head_dim, c.attention_cap, 0};
            own.stride = size * c.kv_heads * own.head_bytes();
            before = (slots / UNIT * own.stride + 4095) / 4096 * 4096;
            coded.assign(size, own);
            table.start(block, slots / block, staged);
            count = (int64_t)staged * block;
            type = CACHE_FP16;
        }
        const int64_t groups = (count + 15) / 16, codes = (int64_t)c.kv_heads * 16 * dim_padded * cache_bytes(type);
        const int64_t scales = type == CACHE_INT8 ? (int64_t)c.kv_heads * 16 * 4 : 0, stride = size * 2 * (codes + scales);
        if (!pages.need(before + groups * stride + 4096)) { coded.clear(); return false; }
        for (int l = 0; l < (int)coded.size(); l++) coded[l].data = pages.data + l * c.kv_heads * coded[l].head_bytes();
        for (int l = 0; l < size; l++) {
            char* at = pages.data + before + l * 2 * (codes + scales);
            float* scale = scales ? (float*)(at + 2 * codes) : nullptr;
            cache.push_back({at, at + codes, scale, scales ? scale + scales / 4 : nullptr, type, c.kv_heads, c.head_dim, dim_padded, c.attention_cap, stride});
        }
        return true;
    }

    bool allocate_latents(int type, int size) {
        LatentCache one = {nullptr, type, latent->rank, latent->rope, latent->group, integer(c.layer[0].o), 0, 0, 0};
        IndexCache key = {nullptr, type, indexer ? indexer->dim : 0, latent->group, one.integer && type == CACHE_INT8 && latent->group % 16 == 0, 0, 0};
        int count = 0;
        for (int l = 0; l < c.layers; l++) count += c.layer[l].latent->indexer != nullptr;
        one.unit = one.group_bytes();
        key.unit = key.group_bytes();
        one.stride = key.stride = RUN / 16 * (size * one.unit + count * key.unit);
        if (!pages.need((slots + RUN - 1) / RUN * one.stride + 4096)) return false;
        for (int l = 0; l < size; l++, latents.push_back(one)) one.data = pages.data + l * RUN / 16 * one.unit;
        if (!indexer) return true;
        index.assign(size, key);
        char* at = pages.data + size * RUN / 16 * one.unit;
        for (int l = 0; l < c.layers; l++) {
            if (!c.layer[l].latent->indexer) continue;
            index[places[l].number].data = at;
            at += RUN / 16 * key.unit;
        }
        return true;
    }
    bool allocated() const { return !cache.empty() || !latents.empty(); }
    void copy_slots(int from, int to) const {
        for (const Cache& k : cache) copy_slot(k, from, to);
        for (const LatentCache& k : latents) copy_latent(k, from, to);
        for (const IndexCache& k : index) if (k.data) copy_index(k, from, to);
    }

    // ---- phases: every function below runs on all threads, thread `t` of `n` ------------------------------------------------------

    // Quantizes rows of x for each distinct need among the linears.
    void quantize(const Linear* const* parts, int count, const float* x, int ldx, int first, int last, Codes* coded) {
        for (int i = 0; i < count; i++) {
            const Linear& w = *parts[i];
            if (!integer(w)) continue;
            bool done = false;
            for (int j = 0; j < i; j++) done |= same_codes(w, *parts[j]);
            if (done) continue;
            const int blocks = w.k_padded / w.block;
            for (int r = first; r < last; r++)
                quantize_row(x + (int64_t)r * ldx, w.k_padded, w.block, w.per_token, factor(w),
                             tiled_row(coded[i].codes.data, coded[i].scale.data, coded[i].sum.data, r, w.k_padded, blocks));
        }
    }

    // y_i = x W_i^T for up to three linears over the same rows, panels shared between the threads.
    void linears(const Linear* const* parts, int count, const float* x, int ldx, const Codes* coded, int rows, float* const* y, const int* ldy,
                 bool accumulate, int t, int n, const Lora* const* lora) {
        int total = 0, first, last;
        for (int i = 0; i < count; i++) total += num_panels(*parts[i]);
        share(total, t, n, first, last);
        for (int i = 0, at = 0; i < count; i++) {
            const Linear& w = *parts[i];
            int source = i;
            for (int j = i - 1; j >= 0; j--)
                if (integer(w) && same_codes(w, *parts[j])) source = j;
            const Activations a = {x, ldx, coded[source].codes.data, coded[source].scale.data, coded[source].sum.data};
            const int p0 = std::max(first - at, 0), p1 = std::min(last - at, num_panels(w));
            if (p0 < p1) multiply(w, a, rows, p0, p1, y[i], ldy[i], accumulate, scratch[t]->panel.data);
            at += num_panels(w);
        }
        if (lora) add_adapters(parts, count, x, ldx, y, ldy, t, n, lora);
        team.barrier(t);
    }

    // h += norm(x W^T), through a buffer where there is more to do than to add: adapters scale the product, not the residual stream.
    void add_to_residual(const Linear* part, const float* norm, const float* x, int ldx, const Codes* coded, int t, int n, const Lora* lora) {
        const int T = b->tokens_n;
        const bool aside = lora || norm || c.residual_scale != 1.0f;
        float* to[] = {aside ? product.data : h.data};
        linears(&part, 1, x, ldx, coded, T, to, &ld_hidden, !aside, t, n, lora ? &lora : nullptr);
        if (!aside) return;
        int first, last;
        share(T, t, n, first, last);
        for (int r = first; r < last; r++) {
            float *from = product.data + (int64_t)r * ld_hidden, *row = h.data + (int64_t)r * ld_hidden;
            if (norm) normalize(from, norm, from);
            for (int i = 0; i < c.hidden; i++) row[i] += c.residual_scale * from[i];
        }
        team.barrier(t);
    }

    // y_i[row] += B (A x[row]) for rows whose sequence has an adapter; lora[i] is indexed by row.
    void add_adapters(const Linear* const* parts, int count, const float* x, int ldx, float* const* y, const int* ldy, int t, int n,
                      const Lora* const* lora) {
        const int rows = b->tokens_n;
        int first, last;
        for (int i = 0; i < count; i++) {
            if (!lora[i]) continue;
            team.barrier(t);
            share(rows, t, n, first, last);
            for (int r = first; r < last; r++) {
                const Lora* l = row_lora(lora[i], r);
                if (!l) continue;
                for (int j = 0; j < l->rank; j++) {
                    const float* a = l->a + (int64_t)j * parts[i]->k;
                    const float* xr = x + (int64_t)r * ldx;
                    V s = set1(0.0f);
                    int k = 0;
                    for (; k + W <= parts[i]->k; k += W) s = fma(load(a + k), load(xr + k), s);
                    float d = hsum(s);
                    for (; k < parts[i]->k; k++) d += a[k] * xr[k];
                    low.data[(int64_t)r * low_ld + j] = d;
                }
            }
            team.barrier(t);
            share(num_panels(*parts[i]), t, n, first, last);
            first *= PANEL;
            last = std::min(last * PANEL, parts[i]->n);
            for (int r = 0; r < rows; r++) {
                const Lora* l = row_lora(lora[i], r);
                if (!l) continue;
                float* out = y[i] + (int64_t)r * ldy[i];
                const float* bias = parts[i]->bias;
                for (int k = first; k < last; k++) if (bias) out[k] -= bias[k];
                for (int j = 0; j < l->rank; j++) {
                    const float* bj = l->b + (int64_t)j * parts[i]->n;
                    const float d = low.data[(int64_t)r * low_ld + j];
                    int k = first;
                    for (; k + W <= last; k += W) store(out + k, fma(load(bj + k), set1(d), load(out + k)));
                    for (; k < last; k++) out[k] += bj[k] * d;
                }
                for (int k = first; k < last; k++) {
                    if (l->row_scale) out[k] *= l->row_scale[k];
                    if (bias) out[k] += bias[k];
                }
            }
        }
    }
    int low_ld = 0;
    std::vector<int32_t> row_slot;
    const Lora* row_lora(const Lora* lora, int row) const {  // lora: of the first slot
        const int slot = row_slot[row];
        if (slot < 0) return nullptr;
        const Lora* l = lora + (int64_t)slot * c.layers * TARGETS;
        return l->rank ? l : nullptr;
    }

    // Rows [first, last) that thread t prepares for the next linears: its share, or all of them into its own `Inputs`.
    Inputs& prepare_rows(int rows, int t, int n, int& first, int& last) {
        if (own) { first = 0; last = rows; }
        else share(rows, t, n, first, last);
        return *inputs[own ? t : 0];
    }
    void prepared(int t) { if (!own) team.barrier(t); }

    void normalize(const float* x, const float* weight, float* out) const {
        (c.centred ? layer_norm : rms_norm)(x, weight, c.hidden, c.eps, out);
    }
    // What the layer's attention has read, for its feed-forward part.
    Inputs& same_rows(const Linear* const* parts, int count, int rows, int t, int n) {
        int first, last;
        Inputs& in = prepare_rows(rows, t, n, first, last);
        quantize(parts, count, in.normed.data, ld_hidden, first, last, in.coded);
        prepared(t);
        return in;
    }
    Inputs& norm_rows(const float* weight, const Linear* const* parts, int count, int rows, int t, int n) {
        int first, last;
        Inputs& in = prepare_rows(rows, t, n, first, last);
        float* out = in.normed.data;
        for (int64_t r = first; r < last; r++) {
            if (weight) normalize(h.data + r * ld_hidden, weight, out + r * ld_hidden);
            else memcpy(out + r * ld_hidden, h.data + r * ld_hidden, c.hidden * 4);
        }
        quantize(parts, count, out, ld_hidden, first, last, in.coded);
        prepared(t);
        return in;
    }

    // gate and up, then silu(gate) * up as input of down. Where blocks allow it each thread goes on with the columns it has computed.
    // The codes go where no linear of this phase reads: another thread may still be at its gate and up.
    const Codes* gate_up_down(const Layer& y, Inputs& in, int t, int n, const Lora* const* lora) {
        const int T = b->tokens_n;
        const Linear *parts[] = {&y.gate, &y.up}, *down[] = {&y.down};
        float* out[] = {gate.data, up.data};
        const int ld[] = {ld_inter, ld_inter}, step = std::max(CHUNK, y.down.block);
        Codes* to = inputs[0]->coded + 2;
        const Activation act = (Activation)c.activation;
        if (!lora && !y.down_norm && same_codes(y.gate, y.up) && integer(y.down) && !y.down.per_token &&
            y.down.k == y.down.k_padded && c.intermediate % step == 0) {
            const Activations a = {in.normed.data, ld_hidden, in.coded[0].codes.data, in.coded[0].scale.data, in.coded[0].sum.data};
            int first, last;
            share(c.intermediate / step, t, n, first, last);
            first *= step;
            last *= step;
            for (int i = 0; i < 2; i++)
                multiply(*parts[i], a, T, first / PANEL, last / PANEL, out[i], ld_inter, false, scratch[t]->panel.data);
            const int blocks = y.down.k_padded / y.down.block;
            for (int r = 0; r < T && first < last; r++) {
                float* g = gate.data + (int64_t)r * ld_inter + first;
                gated(act, g, up.data + (int64_t)r * ld_inter + first, last - first, g);
                const CodeRow row = tiled_row(to->codes.data, to->scale.data, to->sum.data, r, y.down.k_padded, blocks);
                quantize_row(g, last - first, y.down.block, false, factor(y.down), from_input(row, first, y.down.block));
            }
            team.barrier(t);
            return to;
        }
        linears(parts, 2, in.normed.data, ld_hidden, in.coded, T, out, ld, false, t, n, lora);
        int first, last;
        share(T, t, n, first, last);
        for (int r = first; r < last; r++) {
            float* g = gate.data + (int64_t)r * ld_inter;
            gated(act, g, up.data + (int64_t)r * ld_inter, c.intermediate, g);
            if (y.down_norm) rms_norm(g, y.down_norm, c.intermediate, c.eps, g);
            for (int i = c.intermediate; i < ld_inter; i++) g[i] = 0.0f;
        }
        quantize(down, 1, gate.data, ld_inter, first, last, to);
        team.barrier(t);
        return to;
    }

    int visible(int s, int row) const {  // keys that row `row` of sequence s sees, itself included
        const int q = b->query_starts[s + 1] - b->query_starts[s], before = b->context_lens[s] - q;
        const uint8_t* mask = b->tree ? b->tree[s] : nullptr;
        if (!mask) return before + row + 1;
        int count = before;
        for (int j = 0; j < q; j++) count += mask[row * q + j];
        return count;
    }
    bool picks(int s, int row) const { return top && visible(s, row) > top; }
    int attended(int s, int row) const { return picks(s, row) ? top : visible(s, row); }
    void bounds(int s, int first, int rows, int& fewest, int& most) const {  // keys that rows [first, first + rows) of sequence s attend to
        fewest = most = attended(s, first);
        for (int r = 1; r < rows; r++) {
            const int sees = attended(s, first + r);
            fewest = std::min(fewest, sees);
            most = std::max(most, sees);
        }
    }
    int slot_of(int group, int s, int index) const {
        const int32_t* blocks = b->block_tables + ((int64_t)group * b->sequences + s) * b->table_width;
        return blocks[index / b->block_size] * b->block_size + index % b->block_size;
    }
    int written(int layer, int row) const { return b->slots[(int64_t)places[layer].group * b->tokens_n + row]; }  // where a row's keys go
    // Slots of keys [first, first + count) of the list that row `row` of sequence s sees.
    void list_slots(int group, int s, int row, int first, int count, int32_t* out) const {
        const int q = b->query_starts[s + 1] - b->query_starts[s], before = b->context_lens[s] - q;
        const uint8_t* mask = b->tree ? b->tree[s] : nullptr;
        int i = 0;
        const int plain = mask ? std::max(0, std::min(count, before - first)) : count;
        while (i < plain) {
            int slot = slot_of(group, s, first + i), left = b->block_size - (first + i) % b->block_size;
            for (; left > 0 && i < plain; left--) out[i++] = slot++;
        }
        if (i == count) return;
        int index = before;
        for (int j = 0; j < q; j++) {
            if (!mask[row * q + j]) continue;
            if (index >= first + i && i < count) out[i++] = slot_of(group, s, before + j);
            index++;
        }
    }

    // The same of the list that it attends to.
    void list_attended(int group, int s, int row, int first, int count, int32_t* out) const {
        if (picks(s, row)) memcpy(out, chosen.data + (int64_t)(b->query_starts[s] + row) * top + first, count * sizeof(int32_t));
        else list_slots(group, s, row, first, count, out);
    }

    // Work items of the step's attention: tiles of rows by kv head, cut by chunk where there would be too few.
    void plan(int threads) {
        items.clear();
        const int group = c.heads / c.kv_heads, tile = std::max(1, 48 / group);
        int whole = 0;
        for (int s = 0; s < b->sequences; s++) {
            const int q = b->query_starts[s + 1] - b->query_starts[s];
            whole += (q + tile - 1) / tile * c.kv_heads;
        }
        const bool cut = own || (threads > 1 && whole < 8 * threads);
        any_split = false;
        cut_items.clear();
        int partials = 0;
        for (int s = 0; s < b->sequences; s++) {
            const int q = b->query_starts[s + 1] - b->query_starts[s];
            for (int r = 0, rows; r < q; r += rows) {
                rows = std::min(tile, q - r);
                int fewest, most;
                if (!coded.empty()) rows = std::min(rows, table.size - (b->context_lens[s] - q + r) % table.size);  // see kivi.py
                bounds(s, r, rows, fewest, most);
                const int own_block = coded.empty() ? 0 : (most - 1) / table.size * table.size;
                const int chunks = (own_block + KEYS - 1) / KEYS + (most - own_block + KEYS - 1) / KEYS;
                for (int head = 0; head < c.kv_heads; head++) {
                    if (!cut || (chunks < 3 && !own)) { items.push_back({s, r, rows, head, -1, 0}); continue; }
                    any_split = true;
                    cut_items.push_back((int)items.size());
                    for (int k = 0; k < chunks; k++) items.push_back({s, r, rows, head, k, partials + k * rows * group});
                    partials += chunks * rows * group;
                }
            }
        }
        split.need(partials);
        split_out.need((size_t)partials * out_width);
    }

    // attend(slots of keys that these queries see, how many, the queries, [from, to) of each, results, what is next): one chunk of an item.
    template <typename F> void attend_item(const Item& item, int layer, Scratch& w, F attend) {
        const int group = c.heads / c.kv_heads, nq = item.rows * group, base = b->query_starts[item.sequence] + item.first;
        const int window = (int)c.layer[layer].window;
        const float** query = w.query.need(nq);
        int *from = w.from.need(nq), *to = w.to.need(nq);
        int shortest, longest;
        bounds(item.sequence, item.first, item.rows, shortest, longest);
        // Keys that all rows of a tree see; behind them each row has its own. Where keys are chosen each row has its own from the first on.
        bool picked = false;
        for (int r = 0; r < item.rows; r++) picked |= picks(item.sequence, item.first + r);
        const int common = picked ? 0 : b->tree && b->tree[item.sequence]
            ? b->context_lens[item.sequence] - b->query_starts[item.sequence + 1] + b->query_starts[item.sequence] : longest;
        if (window && item.chunk >= 0 && (item.chunk + 1) * KEYS <= shortest - window) {  // no row sees it
            std::fill_n(split.data + item.partial, nq, Partial{NONE, 0.0f});
            return;
        }
        for (int i = 0; i < nq; i++) query[i] = q.data + (int64_t)(base + i / group) * ld_q + (item.kv_head * group + i % group) * key_width;
        int chunk = item.chunk < 0 ? 0 : item.chunk, stop = item.chunk < 0 ? (longest + KEYS - 1) / KEYS : item.chunk + 1;
        if (window && item.chunk < 0) chunk = std::max(0, shortest - window) / KEYS;
        Partial *part, *run = w.running.need(nq);
        float *out, *total = w.run.need((size_t)nq * out_width);
        if (item.chunk >= 0) { part = split.data + item.partial; out = split_out.data + (int64_t)item.partial * out_width; }
        else { part = w.partial.need(nq); out = w.out.need((size_t)nq * out_width); }
        for (int i = 0; i < nq; i++) {
            run[i] = {NONE, 0.0f};
            for (int d = 0; d < out_width; d++) total[(int64_t)i * out_width + d] = 0.0f;
        }
        for (; chunk < stop; chunk++) {
            const int first = chunk * KEYS;
            for (int i = 0; i < nq; i++) {
                const int sees = attended(item.sequence, item.first + i / group);
                to[i] = std::min(sees - first, KEYS);
                from[i] = window ? std::max(0, sees - window - first) : 0;
            }
            const int rows = first + KEYS > common ? 1 : item.rows;  // at a time
            for (int r = 0; r < item.rows; r += rows) {
                const int count = std::max(0, std::min(KEYS, attended(item.sequence, item.first + r + rows - 1) - first)), i = r * group;
                int32_t slots[KEYS];
                list_attended(places[layer].group, item.sequence, item.first + r + rows - 1, first, count, slots);
                attend(slots, count, rows * group, query + i, from + i, to + i, part + i, out + (int64_t)i * out_width,
                       nq <= few() ? ahead_of(item, chunk, stop, longest, w) : Ahead{});
            }
            if (item.chunk < 0)
                for (int i = 0; i < nq; i++) merge(run[i], total + (int64_t)i * out_width, part[i], out + (int64_t)i * out_width, out_width);
        }
        if (item.chunk < 0)
            for (int i = 0; i < nq; i++) write_result(*inputs[0], c.layer[layer], base + i / group, item.kv_head * group + i % group, run[i], total + (int64_t)i * out_width);
    }
    template <typename T> void attend_heads(const Item& item, int layer, Scratch& w) {
        const Cache& cached = cache[places[layer].number];
        attend_item(item, layer, w, [&](const int32_t* slots, int count, int nq, const float* const* query, const int* from, const int* to,
                                        Partial* part, float* out, const Ahead& ahead) {
            Chunk keys;
            find_chunk<T>(cached, item.kv_head, slots, count, w.gathered, keys);
            Soon soon;
            const bool more = ahead.first < ahead.last;
            if (ahead.sparse && keys.values[0] != w.coming) prefetch_chunk<T>(keys.values, keys.groups);
            for (int g = 0; g < GROUPS && more; g++) {
                const int slot = slot_of(places[layer].group, ahead.sequence, std::min(ahead.first + 16 * g, ahead.last - 1)) / 16 * 16;
                soon.keys[g] = (const char*)((const T*)cached.keys + key_at(cached, slot, ahead.head, 0));
                soon.values[g] = (const char*)((const T*)cached.values + value_at(cached, slot, ahead.head));
            }
            w.coming = more ? soon.values[0] : nullptr;
            attend_all<T>(cached, keys, nq, query, from, to, part, out, more ? &soon : nullptr);
        });
    }
    void attend_latent_item(const Item& item, int layer, Scratch& w) {
        const LatentCache& cached = latents[places[layer].number];
        float* own = w.rows.need((size_t)KEYS * key_width);
        attend_item(item, layer, w, [&](const int32_t* slots, int count, int nq, const float* const* query, const int* from, const int* to,
                                        Partial* part, float* out, const Ahead& ahead) {
            const char* rows[2 * KEYS];
            int32_t after[KEYS];
            const int count_ahead = ahead.last - ahead.first;
            if (count_ahead) list_attended(places[layer].group, ahead.sequence, ahead.row, ahead.first, count_ahead, after);
            int asked = 0;
            for (int i = 0; i < count_ahead; i++) {
                if (cached.scales() && (!i || after[i] / 16 != after[i - 1] / 16)) rows[asked++] = (const char*)cached.scale(after[i] / 16 * 16);
                rows[asked++] = cached.row(after[i]);
            }
            (multiplies_codes(cached) ? attend_codes : attend_latents)(cached, slots, count, nq, query, from, to, own, part, out, rows, asked);
        });
    }
    struct Ahead {  // keys [first, last) that this thread will likely need next
        bool sparse = false;  // few queries over many keys, which come from memory
        int sequence = 0, head = 0, first = 0, last = 0, row = 0;
    };
    int few() const { return latent ? std::max(16, c.heads) : 16; }
    Ahead ahead_of(const Item& item, int chunk, int stop, int longest, const Scratch& w) const {  // the following chunk, or that of the next item
        Ahead a = {true, item.sequence, item.kv_head, (chunk + 1) * KEYS, longest, item.first + item.rows - 1};
        if (chunk + 1 == stop) {
            const int i = any_split ? w.upcoming : next.load(std::memory_order_relaxed);
            if (i >= (int)items.size()) return {true};
            const int row = items[i].first + items[i].rows - 1;
            a = {true, items[i].sequence, items[i].kv_head, std::max(items[i].chunk, 0) * KEYS,
                 latent ? attended(items[i].sequence, row) : b->context_lens[items[i].sequence], row};
        }
        a.last = std::max(a.first, std::min(a.last, a.first + KEYS));
        return a;
    }
    static void prefetch(const void* from, int bytes) { for (int p = 0; p < bytes; p += 64) __builtin_prefetch((const char*)from + p, 0, 2); }
    // attend_item() over a KIVI cache: chunks of codes, then those of the rows' own block, in fp16.
    template <int BITS> void attend_coded_item(const Item& item, int layer, Scratch& w) {
        const Coded& codes = coded[places[layer].number];
        const Cache& rows16 = cache[places[layer].number];
        const int group = c.heads / c.kv_heads, nq = item.rows * group, base = b->query_starts[item.sequence] + item.first;
        const int window = (int)c.layer[layer].window, longest = visible(item.sequence, item.first + item.rows - 1);
        const int own_block = (longest - 1) / table.size * table.size, before = (own_block + KEYS - 1) / KEYS;
        const float** query = w.query.need(nq);
        int *from = w.from.need(nq), *to = w.to.need(nq);
        for (int i = 0; i < nq; i++) query[i] = q.data + (int64_t)(base + i / group) * ld_q + (item.kv_head * group + i % group) * dim_padded;
        int chunk = item.chunk < 0 ? 0 : item.chunk, stop = item.chunk < 0 ? before + (longest - own_block + KEYS - 1) / KEYS : item.chunk + 1;
        if (window && item.chunk < 0) chunk = std::min(before, std::max(0, longest - item.rows + 1 - window) / KEYS);
        Partial *part, *run = w.running.need(nq);
        float *out, *total = w.run.need((size_t)nq * dim_padded);
        if (item.chunk >= 0) { part = split.data + item.partial; out = split_out.data + (int64_t)item.partial * dim_padded; }
        else { part = w.partial.need(nq); out = w.out.need((size_t)nq * dim_padded); }
        for (int i = 0; i < nq; i++) {
            run[i] = {NONE, 0.0f};
            for (int d = 0; d < dim_padded; d++) total[(int64_t)i * dim_padded + d] = 0.0f;
        }
        for (; chunk < stop; chunk++) {
            const bool is_coded = chunk < before;
            const int first = is_coded ? chunk * KEYS : own_block + (chunk - before) * KEYS;
            for (int i = 0; i < nq; i++) {
                const int sees = visible(item.sequence, item.first + i / group);
                to[i] = std::min(sees - first, KEYS);
                from[i] = window ? std::max(0, sees - window - first) : 0;
            }
            if (is_coded) {
                CodedChunk keys;
                keys.units = std::min(KEYS, own_block - first) / UNIT;
                for (int n = 0; n < keys.units; n++) keys.at[n] = codes.unit(slot_of(0, item.sequence, first + n * UNIT), item.kv_head);
                if (nq <= 16) prefetch_coded(codes, item, chunk, before, w);
                for (int i = 0; i < nq; i++) to[i] = keys.units * UNIT;
                attend_all_coded<BITS>(codes, rows16, keys, nq, query, from, to, w.gathered, part, out);
            } else {
                int32_t slots[KEYS];
                const int count = std::min(KEYS, longest - first);
                for (int i = 0; i < count; i++) slots[i] = table.row(slot_of(0, item.sequence, first + i));
                Chunk keys;
                find_chunk<uint16_t>(rows16, item.kv_head, slots, count, w.gathered, keys);
                attend_all<uint16_t>(rows16, keys, nq, query, from, to, part, out);
            }
            if (item.chunk < 0)
                for (int i = 0; i < nq; i++) merge(run[i], total + (int64_t)i * dim_padded, part[i], out + (int64_t)i * dim_padded, dim_padded);
        }
        if (item.chunk < 0)
            for (int i = 0; i < nq; i++) write_result(*inputs[0], c.layer[layer], base + i / group, item.kv_head * group + i % group, run[i], total + (int64_t)i * dim_padded);
    }
    // The codes that this thread will likely need next, as prefetch_keys().
    void prefetch_coded(const Coded& codes, const Item& item, int chunk, int before, const Scratch& w) const {
        int sequence = item.sequence, head = item.kv_head, first = (chunk + 1) * KEYS;
        if (item.chunk >= 0) {
            if (w.upcoming >= (int)items.size()) return;
            const Item& coming = items[w.upcoming];
            sequence = coming.sequence;
            head = coming.kv_head;
            first = std::max(coming.chunk, 0) * KEYS;
            before = ((b->context_lens[sequence] - 1) / table.size * table.size + KEYS - 1) / KEYS;
        }
        if (first >= before * KEYS) return;
        for (int n = 0; n < KEYS / UNIT && first + n * UNIT < b->context_lens[sequence]; n++) {
            const char* at = codes.unit(slot_of(0, sequence, first + n * UNIT), head);
            for (int p = 0; p < (int)codes.head_bytes(); p += 64) __builtin_prefetch(at + p, 0, 2);
        }
    }
    template <typename T> void prefetch_chunk(const void* const* groups, int count) const {
        for (int g = 0; g < count; g++) prefetch(groups[g], 16 * dim_padded * (int)sizeof(T));
    }
    // What one head returns for a row: into the input of o, or into the weighted latents.
    void write_result(Inputs& in, const Layer& y, int row, int head, const Partial& run, const float* total) {
        float* out = latent ? weighted.data + ((int64_t)row * c.heads + head) * out_width : in.mixed.data + (int64_t)row * ld_mixed + head * c.head_dim;
        float r = 1.0f / run.sum;
        if (y.sinks) {  // one more logit, without a value
            const float top = std::max(run.largest, y.sinks[head]), mine = expf(run.largest - top);
            r = mine / (run.sum * mine + expf(y.sinks[head] - top));
        }
        for (int d = 0, n = latent ? out_width : c.head_dim; d < n; d++) out[d] = total[d] * r;
    }

    // Queries, keys and values of the step.
    void project_heads(const Layer& y, const Lora* base, int t, int n) {
        const Linear* parts[] = {&y.q, &y.k, &y.v};
        const Lora* lora[] = {base, base + 1, base + 2};
        float* out[] = {gate.data, kv.data, kv.data + c.kv_heads * c.head_dim};
        const int ld[] = {ld_qkv, ld_kv, ld_kv};
        Inputs& in = norm_rows(y.input_norm, parts, 3, b->tokens_n, t, n);
        linears(parts, 3, in.normed.data, ld_hidden, in.coded, b->tokens_n, out, ld, false, t, n, base ? lora : nullptr);
    }

    void attention(int layer, int t) {
        Scratch& w = *scratch[t];
        // a thread takes the next chunk of a cut item before it computes one, so that it asks memory for its own
        for (int i = next.fetch_add(1); i < (int)items.size(); i = any_split ? w.upcoming : next.fetch_add(1)) {
            if (any_split) w.upcoming = next.fetch_add(1);
            if (latent) attend_latent_item(items[i], layer, w);
            else if (!coded.empty()) coded[0].bits == 4 ? attend_coded_item<4>(items[i], layer, w) : attend_coded_item<2>(items[i], layer, w);
            else if (cache[0].type == CACHE_FP32) attend_heads<float>(items[i], layer, w);
            else if (cache[0].type == CACHE_FP16) attend_heads<uint16_t>(items[i], layer, w);
            else attend_heads<int8_t>(items[i], layer, w);
        }
        team.barrier(t);
        if (!any_split || latent) return;  // those of latents are merged where they are read
        const int group = c.heads / c.kv_heads, n = own ? 1 : team.active();
        for (size_t i = 0; i < cut_items.size(); i++) {
            if ((int)i % n != t && !own) continue;
            const Item& item = items[cut_items[i]];
            for (int j = 0; j < item.rows * group; j++) merge_chunks(*inputs[own ? t : 0], cut_items[i], j, layer, w);
        }
        prepared(t);
    }
    // Query j of a cut item, chunk by chunk, in order.
    void merge_chunks(Inputs& in, int first, int j, int layer, Scratch& w) {
        const Item& item = items[first];
        const int group = c.heads / c.kv_heads;
        float* total = w.run.need((size_t)out_width);
        Partial run = {NONE, 0.0f};
        for (int d = 0; d < out_width; d++) total[d] = 0.0f;
        for (size_t k = first; k < items.size() && items[k].chunk == (int)k - first; k++) {
            const int64_t p = items[k].partial + j;
            merge(run, total, split.data[p], split_out.data + p * out_width, out_width);
        }
        write_result(in, c.layer[layer], b->query_starts[item.sequence] + item.first + j / group, item.kv_head * group + j % group, run, total);
    }

    // ---- latents: what stands in for norm and rotation of heads, and behind the attention ----

    static constexpr int BLOCK_ROWS = 64;  // of W_UK and W_UV at once
    LatentLora latent_lora(const Lora* base, int row) const {
        const Lora* l = base ? row_lora(base + 2, row) : nullptr;
        return l ? LatentLora{l->rank, c.heads * (latent->nope + latent->value), l->a, l->b, l->row_scale} : LatentLora{};
    }
    // Queries, latents and their keys of the step, and what an indexer makes.
    void project_latents(const Layer& y, const Lora* base, int t, int n) {
        const int T = b->tokens_n, low = y.latent->query_rank;
        const Indexer* x = y.latent->indexer;
        const Linear *parts[] = {low ? &y.latent->down : &y.q, &y.k, x ? &x->k : nullptr, x ? &x->weights : nullptr};
        const Lora* lora[] = {low ? base + 7 : base, base + 1, nullptr, nullptr};
        float* out[] = {low ? low_query.data : gate.data, kv.data, index_key.data, index_weight.data};
        const int ld[] = {low ? ld_ranked : ld_qkv, ld_kv, x ? x->dim : 0, x ? x->heads : 0};
        const bool asks = x && !index_items.empty();  // else only its keys are wanted
        const int count = asks ? 4 : x ? 3 : 2;
        Inputs& hidden = norm_rows(y.input_norm, parts, count, T, t, n);
        linears(parts, count, hidden.normed.data, ld_hidden, hidden.coded, T, out, ld, false, t, n, base ? lora : nullptr);
        if (!low) return;
        int first, last;
        Inputs& in = prepare_rows(T, t, n, first, last);
        for (int64_t r = first; r < last; r++)
            rms_norm(low_query.data + r * ld_ranked, y.latent->query_norm, y.latent->query_rank, LATENT_EPS, in.ranked.data + r * ld_ranked);
        const Linear* queries[] = {&y.q, x ? &x->q : nullptr};
        const Lora* of_queries[] = {base, nullptr};
        float* made[] = {gate.data, index_query.data};
        const int ld_made[] = {ld_qkv, x ? x->heads * x->dim : 0}, both = asks ? 2 : 1;
        quantize(queries, both, in.ranked.data, ld_ranked, first, last, in.coded);
        prepared(t);
        linears(queries, both, in.ranked.data, ld_ranked, in.coded, T, made, ld_made, false, t, n, base ? of_queries : nullptr);
    }
    // An indexer's key of row r into the cache; its queries rotated, and the factors of scores within them and within the weights.
    void store_index(const Indexer& x, int layer, int64_t r, const float* cs, const float* sn) {
        float *key = index_key.data + r * x.dim, *query = index_query.data + r * x.heads * x.dim, *weight = index_weight.data + r * x.heads;
        layer_norm(key, x.norm, x.dim, LATENT_EPS, key);
        for (int d = 0; d < x.dim; d++) key[d] += x.bias[d];
        rotate(key, cs, sn, latent->rope, 1.0f);
        write_index(index[places[layer].number], written(layer, (int)r), key);
        if (index_items.empty()) return;
        const float scale = 1.0f / sqrtf((float)x.dim), share = 1.0f / sqrtf((float)x.heads);
        for (int head = 0; head < x.heads; head++, query += x.dim) {
            rotate(query, cs, sn, latent->rope, scale);
            for (int d = latent->rope; d < x.dim; d++) query[d] *= scale;
            weight[head] *= share;
        }
    }

    // Work items of an indexer: few rows at a time, over all keys. With few of them to go round they are cut by keys, and their scores go where
    // all threads find them.
    void plan_index(int threads) {
        constexpr int ROWS = 4, TOGETHER = 8 * KEYS;
        index_items.clear();
        tiles.clear();
        if (!top) return;
        for (int s = 0; s < b->sequences; s++) {
            const int q = b->query_starts[s + 1] - b->query_starts[s], together = b->tree && b->tree[s] ? 1 : ROWS;
            for (int r = 0, rows; r < q; r += rows) {
                rows = 1;
                if (!picks(s, r)) continue;
                rows = std::min(together, q - r);
                const int longest = visible(s, r + rows - 1);
                tiles.push_back({s, r, rows, 0, longest, round_up(longest, KEYS), -1});
            }
        }
        chosen.need((size_t)b->tokens_n * top);
        const bool cut = threads > 1 && (int)tiles.size() < 4 * threads;
        int64_t scores = 0;
        for (IndexItem& tile : tiles) {
            if (!cut) { index_items.push_back(tile); continue; }
            tile.scores = scores;
            for (int from = 0; from < tile.to; from += TOGETHER)
                index_items.push_back({tile.sequence, tile.first, tile.rows, from, std::min(from + TOGETHER, tile.to), tile.ld, scores});
            scores += tile.rows * tile.ld;
        }
        index_scores.need((size_t)scores);
    }
    std::vector<IndexItem> tiles;
    // The keys that each row attends to.
    void choose_keys(int layer, int t, int n) {
        if (index_items.empty()) return;
        Scratch& w = *scratch[t];
        const IndexCache& cached = index[places[layer].number];
        const bool cut = tiles[0].scores >= 0;
        for (int i; (i = next_index.fetch_add(1)) < (int)index_items.size();) {
            const IndexItem& item = index_items[i];
            float* scores = cut ? index_scores.data + item.scores : w.scores.need((size_t)(item.rows * item.ld));
            if (cached.type == CACHE_FP32) score_item<float>(cached, item, layer, w, scores);
            else if (cached.type == CACHE_FP16) score_item<uint16_t>(cached, item, layer, w, scores);
            else score_item<int8_t>(cached, item, layer, w, scores);
            for (int r = 0; r < item.rows && !cut; r++) choose_row(item, layer, r, scores, w);
        }
        team.barrier(t);
        if (t == 0) next_index.store(0);
        if (!cut) return;
        int turn = 0;
        for (const IndexItem& tile : tiles)
            for (int r = 0; r < tile.rows; r++)
                if (turn++ % n == t) choose_row(tile, layer, r, index_scores.data + tile.scores, w);
        team.barrier(t);
    }
    template <typename T> void score_item(const IndexCache& cached, const IndexItem& item, int layer, Scratch& w, float* scores) {
        const int64_t row = b->query_starts[item.sequence] + item.first;
        const size_t room = (size_t)KEYS * 2 * cached.dim;
        float* own = w.index_keys.need(2 * room);
        IndexKeys keys[2];
        auto find = [&](int first, int i) {
            int32_t slots[KEYS];
            const int count = std::min(KEYS, item.to - first);
            list_slots(places[layer].group, item.sequence, item.first + item.rows - 1, first, count, slots);
            find_index<T>(cached, slots, count, own + i * room, keys[i]);
        };
        const Indexer& x = *indexer;
        const float *query = index_query.data + row * x.heads * x.dim, *weight = index_weight.data + row * x.heads;
        if (cached.integer) w.rounded.round(cached, item.rows * x.heads, query);
        find(item.from, 0);
        for (int first = item.from, i = 0; first < item.to; first += KEYS, i = 1 - i) {
            const bool more = first + KEYS < item.to;
            if (more) find(first + KEYS, 1 - i);
            const IndexKeys* after = more ? &keys[1 - i] : nullptr;
            if (cached.integer)
                score_index<int8_t>(cached, keys[i], x.heads, item.rows, w.rounded, weight, scores + first, item.ld, after);
            else score_index<T>(cached, keys[i], x.heads, item.rows, query, weight, scores + first, item.ld, after);
        }
    }
    void choose_row(const IndexItem& item, int layer, int r, const float* scores, Scratch& w) {
        const int s = item.sequence, row = item.first + r, seen = visible(s, row), q = b->query_starts[s + 1] - b->query_starts[s];
        if (seen <= top) return;
        int32_t* out = chosen.data + (int64_t)(b->query_starts[s] + row) * top;
        ::choose(scores + r * item.ld, seen, top, out);
        const int before = b->tree && b->tree[s] ? b->context_lens[s] - q : seen;  // behind them a tree's row has its own
        w.slots.resize(seen - before);
        if (seen > before) list_slots(places[layer].group, s, row, before, seen - before, w.slots.data());
        for (int i = 0; i < top; i++) out[i] = out[i] < before ? slot_of(places[layer].group, s, out[i]) : w.slots[out[i] - before];
    }
    // Latents and rotated keys into the cache; queries folded and rotated.
    void store_latents(const Layer& y, int layer, const Lora* base, int t, int n) {
        const Latent& m = *y.latent;
        const int T = b->tokens_n, half = m.rope / 2, each = m.nope + m.rope;
        int first, last;
        share(T, t, n, first, last);
        float* row = scratch[t]->rows.need((size_t)KEYS * key_width);
        for (int64_t r = first; r < last; r++) {
            const float *made = kv.data + r * ld_kv, *cs = cosine.data + r * half, *sn = sine.data + r * half;
            for (int d = 0; d < key_width; d++) row[d] = 0.0f;
            rms_norm(made, m.norm, m.rank, LATENT_EPS, row);
            if (m.rounded) round_to_int8(row, m.rank);
            memcpy(row + out_width, made + m.rank, m.rope * 4);
            rotate(row + out_width, cs, sn, m.rope, 1.0f);
            write_latent(latents[places[layer].number], written(layer, r), row);
            if (m.indexer) store_index(*m.indexer, layer, r, cs, sn);
            for (int head = 0; head < c.heads; head++) {
                float* to = q.data + r * ld_q + head * key_width + out_width;
                memcpy(to, gate.data + r * ld_qkv + head * each + m.nope, m.rope * 4);
                rotate(to, cs, sn, m.rope, m.scale);
            }
        }
        const int blocks = (T + BLOCK_ROWS - 1) / BLOCK_ROWS, groups = m.groups();
        share(c.heads * groups * blocks, t, n, first, last);
        for (int i = first; i < last; i++) {
            const int head = i / blocks / groups, row = i % blocks * BLOCK_ROWS, rows = std::min(BLOCK_ROWS, T - row);
            fold(m, head, i / blocks % groups, gate.data + (int64_t)row * ld_qkv + head * each, ld_qkv, rows,
                 q.data + (int64_t)row * ld_q + head * key_width, ld_q, [&](int r) { return latent_lora(base, row + r); }, scratch[t]->latent);
        }
        team.barrier(t);
    }
    // Values of the weighted latents, into the input of o that all threads share.
    void unfold_latents(const Layer& y, int layer, const Lora* base, int t, int n) {
        const Latent& m = *y.latent;
        const int T = b->tokens_n, blocks = (T + BLOCK_ROWS - 1) / BLOCK_ROWS;
        int first, last;
        share(c.heads * blocks, t, n, first, last);
        for (int i = first; i < last; i++) {
            const int head = i / blocks, row = i % blocks * BLOCK_ROWS, rows = std::min(BLOCK_ROWS, T - row);
            for (int at : cut_items) {
                const int begin = b->query_starts[items[at].sequence] + items[at].first;
                for (int r = std::max(row, begin); r < std::min(row + rows, begin + items[at].rows); r++)
                    merge_chunks(*inputs[0], at, (r - begin) * c.heads + head, layer, *scratch[t]);
            }
            unfold(m, head, weighted.data + ((int64_t)row * c.heads + head) * out_width, c.heads * out_width, rows,
                   inputs[0]->mixed.data + (int64_t)row * ld_mixed + head * m.value, ld_mixed,
                   [&](int r) { return latent_lora(base, row + r); }, scratch[t]->latent);
        }
        team.barrier(t);
    }

    // Norm and rotation of queries and keys, and the cache write, one (token, head) at a time.
    void rotate_and_store(const Layer& layer, int layer_index, int t, int n) {
        const int T = b->tokens_n, heads = c.heads, all = heads + c.kv_heads, hd = c.head_dim, half = c.rotary_dim / 2;
        const float scale = c.query_scale / sqrtf((float)hd);
        const float *turn_cos = layer.rope == 2 ? local_cosine.data : cosine.data, *turn_sin = layer.rope == 2 ? local_sine.data : sine.data;
        int first, last;
        if (c.row_norm) {
            share(T, t, n, first, last);
            for (int64_t r = first; r < last; r++) {
                rms.data[2 * r] = inverse_rms(gate.data + r * ld_qkv, heads * hd, c.eps);
                rms.data[2 * r + 1] = inverse_rms(kv.data + r * ld_kv, c.kv_heads * hd, c.eps);
            }
            team.barrier(t);
        }
        share(T * all, t, n, first, last);
        alignas(64) float key[1024], value[1024], raw[1024];
        for (int i = first; i < last; i++) {
            const int row = i / all, head = i % all;
            const float *cs = turn_cos + (int64_t)row * half, *sn = turn_sin + (int64_t)row * half;
            const bool is_query = head < heads;
            const float* source = is_query ? gate.data + (int64_t)row * ld_qkv + head * hd
                                           : kv.data + (int64_t)row * ld_kv + (head - heads) * hd;
            const float* weight = is_query ? layer.q_norm : layer.k_norm;
            float* out = is_query ? q.data + (int64_t)row * ld_q + head * dim_padded : key;
            if (weight && c.row_norm)
                scale_row(source, rms.data[2 * row + !is_query], weight + (is_query ? head : head - heads) * hd, hd, raw);
            else if (weight && !c.norm_turned) rms_norm(source, weight, hd, c.eps, raw);
            if (weight && !c.norm_turned) source = raw;
            memcpy(out, source, hd * 4);
            const int turned = layer.rope ? c.rotary_dim : 0;
            if (turned) rotate(out, cs, sn, turned, is_query && !c.norm_turned ? scale : 1.0f);
            if (c.norm_turned && weight) rms_norm(out, weight, hd, c.eps, out);
            for (int d = c.norm_turned ? 0 : turned; d < hd && is_query; d++) out[d] *= scale;
            if (is_query) continue;
            const float* v = kv.data + (int64_t)row * ld_kv + c.kv_heads * hd + (head - heads) * hd;
            memcpy(value, v, hd * 4);
            for (int d = hd; d < dim_padded; d++) key[d] = value[d] = 0.0f;
            const int slot = written(layer_index, row);
            write_cache(cache[places[layer_index].number], coded.empty() ? slot : table.row(slot), head - heads, key, value);
        }
        team.barrier(t);
        if (filled.empty()) return;
        const int units = table.size / UNIT;
        share((int)filled.size() * units * c.kv_heads, t, n, first, last);
        for (int i = first; i < last; i++) {
            const int slot = filled[i / c.kv_heads / units] / table.size * table.size + i / c.kv_heads % units * UNIT;
            code_unit(coded[places[layer_index].number], cache[places[layer_index].number], slot, table.row(slot), i % c.kv_heads);
        }
        team.barrier(t);
    }
    int ld_qkv = 0, ld_kv = 0;
    // Pages for the blocks that the step writes to; those of blocks that are behind a sequence are free. False: too few.
    bool turn_pages(const Batch& batch) {
        filled.clear();
        if (coded.empty()) return true;
        for (int s = 0; s < batch.sequences; s++) {
            const int32_t* blocks = batch.block_tables + (int64_t)s * batch.table_width;
            const int computed = batch.context_lens[s] - batch.query_starts[s + 1] + batch.query_starts[s];
            for (int i = computed / table.size - 1; i >= 0 && table.settle(blocks[i]); i--);
        }
        for (int i = 0; i < batch.tokens_n; i++) {
            if (!table.borrow(batch.slots[i] / table.size)) return false;
            if (batch.slots[i] % table.size == table.size - 1) filled.push_back(batch.slots[i]);
        }
        return true;
    }

    void prepare(const Batch& batch) {  // by one thread, before the team starts
        b = &batch;
        const size_t T = batch.tokens_n, rows = round_up(std::max(batch.tokens_n, batch.wanted), TILE);
        ld_qkv = latent ? c.heads * (latent->nope + latent->rope) : c.heads * c.head_dim;
        ld_kv = latent ? latent->rank + latent->rope : 2 * c.kv_heads * c.head_dim;
        h.need(T * ld_hidden + max_padded);
        q.need(T * ld_q);
        kv.need(T * ld_kv);
        gate.need(T * std::max(ld_inter, ld_qkv) + max_padded);
        up.need(T * ld_inter);
        if (latent) weighted.need(T * c.heads * out_width);
        if (latent && latent->query_rank) low_query.need(T * ld_ranked);
        if (indexer) {
            index_query.need(T * indexer->heads * indexer->dim);
            index_key.need(T * indexer->dim);
            index_weight.need(T * indexer->heads);
        }
        for (Buffer<float>* turn : {&cosine, &sine}) turn->need(T * (c.rotary_dim / 2));
        if (c.local_inv_freq) for (Buffer<float>* turn : {&local_cosine, &local_sine}) turn->need(T * (c.rotary_dim / 2));
        if (c.row_norm) rms.need(2 * T);
        if (aside) product.need(T * ld_hidden);
        own = team.active() > 1 && T <= OWN_ROWS && batch.wanted <= OWN_ROWS;
        for (int t = 0; t < (own ? team.active() : 1); t++) {
            inputs[t]->normed.need(rows * ld_hidden + max_padded);
            inputs[t]->mixed.need(T * ld_mixed + max_padded);
            inputs[t]->ranked.need(T * ld_ranked + max_padded);
            for (Codes& k : inputs[t]->coded) {
                k.codes.need(rows * max_padded);
                k.scale.need(rows * (max_padded / 16));
                k.sum.need(rows * (max_padded / 16));
            }
        }
        row_slot.assign(T, -1);
        low_ld = 0;
        if (batch.adapters && lora_slots) {
            for (int s = 0; s < batch.sequences; s++)
                for (int r = batch.query_starts[s]; r < batch.query_starts[s + 1]; r++) row_slot[r] = batch.adapters[s];
            for (const Lora& l : loras) low_ld = std::max(low_ld, l.rank);
            low.need(T * low_ld);
            product.need(T * ld_hidden);
        }
        if (!mixtures.empty()) mixing.prepare(mixtures.data(), c.layers, batch.tokens_n, team.active(), own);
        plan(team.active());
        plan_index(team.active());
        next.store(0);
        next_index.store(0);
    }

    static void turn(const float* inv_freq, float factor, int position, int half, float* cosine, float* sine) {
        for (int i = 0; i < half; i++) {
            const float angle = (float)position * inv_freq[i];
            cosine[i] = cosf(angle) * factor;
            sine[i] = sinf(angle) * factor;
        }
    }

    void run(int t) {
        const int n = team.active(), T = b->tokens_n;
        int first, last;
        share(T, t, n, first, last);
        for (int r = first; r < last; r++) {
            float* row = h.data + (int64_t)r * ld_hidden;
            decode_row(*c.embedding, b->tokens[r], row);
            if (c.embed_scale != 1.0f) for (int i = 0; i < c.hidden; i++) row[i] *= c.embed_scale;
            const int half = c.rotary_dim / 2;
            if (b->cosine) {
                memcpy(cosine.data + (int64_t)r * half, b->cosine + (int64_t)r * half, half * 4);
                memcpy(sine.data + (int64_t)r * half, b->sine + (int64_t)r * half, half * 4);
            } else turn(c.inv_freq, c.rope_factor, b->positions[r], half, cosine.data + (int64_t)r * half, sine.data + (int64_t)r * half);
            if (c.local_inv_freq)
                turn(c.local_inv_freq, 1.0f, b->positions[r], half, local_cosine.data + (int64_t)r * half, local_sine.data + (int64_t)r * half);
        }
        if (own) team.barrier(t);
        const bool adapted = low_ld > 0;
        int64_t visit = spill.first_visit();
        Layer visitor;
        for (int l = 0; l < c.layers; l++) {
            const bool spilled = c.layer[l].spilled_bytes > 0;
            if (spilled) visitor = placed(c.layer[l], spill.wait(visit++));
            const Layer& y = spilled ? visitor : c.layer[l];
            const Lora* base = adapted ? loras.data() + (int64_t)l * TARGETS : nullptr;
            for (int i = 0; i < b->aux_n; i++)
                if (b->aux_layers[i] == l) copy_aux(i, first, last);
            const Linear *o[] = {&y.o}, *gate_up[] = {&y.gate, &y.up};
            const Lora* lora_gu[] = {base + 4, base + 5};
            latent ? project_latents(y, base, t, n) : project_heads(y, base, t, n);
            latent ? store_latents(y, l, base, t, n) : rotate_and_store(y, l, t, n);
            if (latent && y.latent->indexer) choose_keys(l, t, n);
            attention(l, t);
            if (t == 0) next.store(0);
            if (latent) unfold_latents(y, l, base, t, n);
            int r0, r1;
            Inputs& mixed = prepare_rows(T, t, n, r0, r1);
            float* attended = (latent ? *inputs[0] : mixed).mixed.data;
            for (int64_t r = r0; r < r1 && y.o_norm; r++) rms_norm(attended + r * ld_mixed, y.o_norm, c.heads * c.head_dim, c.eps, attended + r * ld_mixed);
            quantize(o, 1, attended, ld_mixed, r0, r1, mixed.coded);
            prepared(t);
            add_to_residual(&y.o, y.attended_norm, attended, ld_mixed, mixed.coded, t, n, adapted ? base + 3 : nullptr);
            const int read = y.mixture ? 0 : 2;
            Inputs& post = c.parallel ? same_rows(gate_up, read, T, t, n) : norm_rows(y.post_norm, gate_up, read, T, t, n);
            if (y.mixture) mixing.run(team, *y.mixture, post.normed.data, ld_hidden, T, h.data, ld_hidden, scratch[t]->panel.data, t, n);
            else {
                const Codes* product_codes = gate_up_down(y, post, t, n, adapted ? lora_gu : nullptr);
                add_to_residual(&y.down, y.fed_norm, gate.data, ld_inter, product_codes, t, n, adapted ? base + 6 : nullptr);
            }
            if (spilled) spill.leave(n);
        }
        for (int i = 0; i < b->aux_n; i++)
            if (b->aux_layers[i] == c.layers) copy_aux(i, first, last);
        const Linear* head[] = {c.head};
        Inputs& in = prepare_rows(b->wanted, t, n, first, last);
        for (int r = first; r < last; r++) {
            float* out = in.normed.data + (int64_t)r * ld_hidden;
            normalize(h.data + (int64_t)b->rows[r] * ld_hidden, c.final_norm, out);
            if (b->hidden && (!own || t == 0)) memcpy(b->hidden + (int64_t)r * c.hidden, out, c.hidden * 4);
        }
        quantize(head, 1, in.normed.data, ld_hidden, first, last, in.coded);
        prepared(t);
        float* out_logits[] = {b->logits};
        const int ldv[] = {c.vocab};
        if (b->logits && b->wanted)
            linears(head, 1, in.normed.data, ld_hidden, in.coded, b->wanted, out_logits, ldv, false, t, n, nullptr);
        if (b->logits && (c.logit_factor != 1.0f || c.logit_cap > 0)) {
            own_columns(t, n, first, last);
            for (int64_t r = 0; r < b->wanted; r++) cap_row(b->logits + r * c.vocab + first, last - first, c.logit_factor, c.logit_cap);
        }
        if (want_best) find_best(t, n);
    }
    // The logits that thread t computed.
    void own_columns(int t, int n, int& first, int& last) {
        share(num_panels(*c.head), t, n, first, last);
        first *= PANEL;
        last = std::min(last * PANEL, c.vocab);
    }
    void find_best(int t, int n) {
        int first, last;
        own_columns(t, n, first, last);
        for (int r = 0; r < b->wanted; r++) {
            const float* x = b->logits + (int64_t)r * c.vocab;
            V m = set1(-INFINITY), s = set1(0.0f);
            int i = first;
            for (; i + W <= last; i += W) { const V v = load(x + i); m = vmax(m, v); s = fma(v, set1(0.0f), s); }
            Best found = {hmax(m), hsum(s), first};
            for (; i < last; i++) { found.value = x[i] > found.value ? x[i] : found.value; found.spoilt += x[i] * 0.0f; }
            while (found.token < last - 1 && x[found.token] != found.value) found.token++;
            best[(int64_t)t * b->wanted + r] = found;
        }
    }
    void copy_aux(int i, int first, int last) {
        for (int r = first; r < last; r++)
            memcpy(b->aux + ((int64_t)r * b->aux_n + i) * c.hidden, h.data + (int64_t)r * ld_hidden, c.hidden * 4);
    }
};

// ---- packing ----------------------------------------------------------------------------------------------------------------------

// codes [n, k] unsigned -> the layout of weights.h, zero codes in the padding. out: panels * chunks * chunk_bytes, zeroed by the caller.
static void pack(const uint8_t* codes, int n, int k, int k_padded, int bits, uint8_t* out) {
    const int chunk_size = CHUNK * PANEL * bits / 8, chunks = k_padded / CHUNK;
    for (int r = 0; r < n; r++)
        for (int i = 0; i < k; i++) {
            uint8_t* chunk = out + ((int64_t)(r / PANEL) * chunks + i / CHUNK) * chunk_size;
            const int q = i % CHUNK / 4, at = 4 * (r % PANEL) + i % 4, v = codes[(int64_t)r * k + i];
            if (bits == 8) chunk[64 * q + at] = (uint8_t)v;
            else if (bits == 4) chunk[64 * (q / 2) + at] |= (uint8_t)(v << 4 * (q % 2));
            else if (bits == 6) {
                chunk[64 * (q / 2) + at] |= (uint8_t)((v & 15) << 4 * (q % 2));
                chunk[256 + 64 * (q / 4) + at] |= (uint8_t)(v >> 4 << 2 * (q % 4));
            }
            else {
                chunk[64 * (q / 4) + at] |= (uint8_t)((v & 3) << 2 * (q % 4));
                if (bits == 3) chunk[128 + at] |= (uint8_t)(v >> 2 << q);
            }
        }
}

// ---- steps ------------------------------------------------------------------------------------------------------------------------

// 0, or 1: no memory for the caches, 2: a token id outside the vocabulary, 3: a slot outside the caches. best: null, or [L] for the first of
// the equal largest logits of each row, -1 where one is not a finite number. 4: the file of spilled layers could not be read. 5: a KIVI
// cache has no page left. 6: other groups of layers than were allocated.
static int step(Model& m, const Batch& batch, int32_t* best) {
    if (!m.allocated()) return 1;
    if (batch.groups != m.groups) return 6;
    for (int i = 0; i < batch.tokens_n; i++) {
        if (batch.tokens[i] < 0 || batch.tokens[i] >= m.c.vocab) return 2;
        for (int g = 0; g < m.groups; g++) {
            const int slot = batch.slots[(int64_t)g * batch.tokens_n + i];
            if (slot < 0 || slot >= m.slots) return 3;
        }
    }
    for (int s = 0; s < m.groups * batch.sequences; s++)
        for (int i = 0; i < batch.context_lens[s % batch.sequences]; i += batch.block_size) {
            const int block = batch.block_tables[(int64_t)s * batch.table_width + i / batch.block_size];
            if (i / batch.block_size >= batch.table_width || block < 0 || (int64_t)(block + 1) * batch.block_size > m.slots) return 3;
        }
    if (!m.turn_pages(batch)) return 5;
    m.prepare(batch);
    const int L = batch.wanted, threads = m.team.active();
    m.want_best = best != nullptr;
    m.best.resize((size_t)(best ? threads * L : 0));
    if (m.spill.failed()) return 4;
    m.team.run([](void* p, int t) { ((Model*)p)->run(t); }, &m);
    m.spill.step_done();
    if (m.spill.failed()) return 4;
    for (int r = 0; best && r < L; r++) {
        Model::Best found = m.best[r];
        float spoilt = found.spoilt;
        for (int t = 1; t < threads; t++) {
            const Model::Best& other = m.best[(int64_t)t * L + r];
            if (other.value > found.value) found = other;
            spoilt += other.spoilt;
        }
        best[r] = spoilt == 0.0f ? found.token : -1;
    }
    return 0;
}

#include "rounds.h"

// ---- C interface ------------------------------------------------------------------------------------------------------------------

extern "C" {

int karui_sizes(int which) {  // so that the wrapper can check that it mirrors the structures
    const int sizes[] = {(int)sizeof(Linear), (int)sizeof(Layer), (int)sizeof(Config), (int)sizeof(Batch), (int)sizeof(Lora), (int)sizeof(Drafter),
                         (int)sizeof(Draft), (int)sizeof(Stream), (int)sizeof(Rounds), (int)sizeof(Medusa), (int)sizeof(Mixture), (int)sizeof(Latent),
                         (int)sizeof(Indexer)};
    return which < 13 ? sizes[which] : -1;
}

void karui_pack(const uint8_t* codes, int n, int k, int k_padded, int bits, uint8_t* out) { pack(codes, n, k, k_padded, bits, out); }

void* karui_model(const Config* config) {
    Model* m = new Model(*config);
    if (m->ready) return m;
    delete m;
    return nullptr;
}
void karui_free(void* model) { delete (Model*)model; }
int karui_allocate(void* model, int64_t slots, int type, int block, int staged, const int32_t* places) {  // [layers][2]
    return ((Model*)model)->allocate(slots, type, block, staged, (const Model::Place*)places) ? 0 : 1;
}
void karui_settle(void* model, const int32_t* blocks, int count) {
    for (int i = 0; i < count; i++) ((Model*)model)->table.settle(blocks[i]);
}

// Takes new weights of the same shapes (and the same number of threads). 1: no memory for the buffers of spilled layers.
int karui_configure(void* model, const Config* config) { return ((Model*)model)->configure(*config) ? 0 : 1; }

int karui_forward(void* model, const Batch* batch) { return step(*(Model*)model, *batch, nullptr); }

void karui_argmax(const float* x, int rows, int n, int32_t* out) {  // the first of equal largest
    for (int r = 0; r < rows; r++) {
        const float* a = x + (int64_t)r * n;
        V m = set1(-INFINITY);
        int i = 0;
        for (; i + W <= n; i += W) m = vmax(m, load(a + i));
        float largest = hmax(m);
        for (; i < n; i++) largest = a[i] > largest ? a[i] : largest;
        int at = 0;
        while (at < n - 1 && a[at] != largest) at++;
        out[r] = at;
    }
}

// See rounds.h.
int karui_rounds(void* model, const Rounds* rounds) { return Deciding(*(Model*)model, *rounds).run(); }

// One draft on the calling thread. Returns the number of nodes.
int karui_draft(const Drafter* drafter, const Linear* embedding, const Draft* draft) {
    static thread_local Team alone(1);
    static thread_local Drafting drafting;
    return drafting.run(alone, *drafter, *embedding, *draft, nullptr, 1);
}

// The same with Medusa's heads; head: the target's.
int karui_medusa(const Medusa* medusa, const Linear* head, const Draft* draft) {
    static thread_local Team alone(1);
    static thread_local MedusaDrafting drafting;
    return drafting.run(alone, *medusa, *head, *draft, nullptr, 1);
}

int karui_threads(void* model) { return ((Model*)model)->team.active(); }  // of the next step, see threads.h

// Of a KIVI cache the fp16 rows of unfinished blocks. 5: no page is left.
int karui_copy_slots(void* model, const int32_t* from, const int32_t* to, int count) {
    Model& m = *(Model*)model;
    for (int i = 0; i < count; i++) {
        if (!m.coded.empty() && !m.table.borrow(to[i] / m.table.size)) return 5;
        const int source = m.coded.empty() ? from[i] : m.table.row(from[i]), target = m.coded.empty() ? to[i] : m.table.row(to[i]);
        m.copy_slots(source, target);
    }
    return 0;
}

// The slots' keys and values out of the caches or, with `write`, into them: data [2][layers][count][kv_heads][dim] in the cache's type, scale
// [2][layers][count][kv_heads] for int8. Of latents data [layers][count][rank + rope], scale [layers][count][scales],
// where there are indexers each with their key behind it, zeros in layers that have none.
void karui_move_slots(void* model, const int32_t* slots, int count, char* data, float* scale, int write) {
    const std::vector<IndexCache>& index = ((Model*)model)->index;
    const std::vector<LatentCache>& latents = ((Model*)model)->latents;
    for (size_t l = 0; l < latents.size(); l++)
        for (int i = 0; i < count; i++) {
            const LatentCache& c = latents[l];
            move_latent(c, slots[i], data, scale, write);
            data += (c.rank + c.rope) * cache_bytes(c.type);
            scale += c.scales();
            if (index.empty()) continue;
            move_index(index[l], slots[i], data, scale, write);
            data += index[l].dim * cache_bytes(c.type);
            scale += index[l].scales();
        }
    const std::vector<Cache>& caches = ((Model*)model)->cache;
    const int64_t layers = (int64_t)caches.size();
    for (int64_t l = 0; l < layers; l++) {
        const Cache& c = caches[l];
        const int64_t row = (int64_t)c.kv_heads * c.dim * cache_bytes(c.type);
        for (int i = 0; i < count; i++) {
            const int64_t key = l * count + i, value = (layers + l) * count + i;
            float *key_scale = scale ? scale + key * c.kv_heads : nullptr, *value_scale = scale ? scale + value * c.kv_heads : nullptr;
            move_slot(c, slots[i], data + key * row, data + value * row, key_scale, value_scale, write);
        }
    }
}

// Units of codes, of which `slots` are the first ones, out of a KIVI cache or into it: data [count][layers][kv_heads][bytes].
void karui_move_units(void* model, const int32_t* slots, int count, char* data, int write) {
    for (int i = 0; i < count; i++)
        for (const Coded& c : ((Model*)model)->coded)
            for (int h = 0; h < c.kv_heads; h++, data += c.head_bytes()) {
                char* own = c.unit(slots[i], h);
                write ? memcpy(own, data, c.head_bytes()) : memcpy(data, own, c.head_bytes());
            }
}

// loras: [slots][layers][TARGETS]; rank 0 leaves a module alone.
void karui_set_loras(void* model, const Lora* loras, int slots) {
    Model* m = (Model*)model;
    m->loras.assign(loras, loras + (size_t)slots * m->c.layers * TARGETS);
    m->lora_slots = slots;
}

// One linear alone, on the calling thread: y [rows, n] = x [rows, k] W^T (+ bias). For tests and other callers.
void karui_linear(const Linear* w, const float* x, int rows, float* y) {
    Work work;
    product(*w, x, w->k, rows, y, w->n, false, work);
}

void karui_decode_rows(const Linear* w, const int32_t* rows, int count, float* out) {
    for (int i = 0; i < count; i++) decode_row(*w, rows[i], out + (int64_t)i * w->k);
}

// values, indices [rows, k]: the k largest of each row, largest first, the lower index first among equals.
void karui_top_k(const float* x, int rows, int n, int k, float* values, int32_t* indices) {
    for (int r = 0; r < rows; r++) {
        const float* a = x + (int64_t)r * n;
        float* v = values + (int64_t)r * k;
        int32_t* at = indices + (int64_t)r * k;
        int held = 0;
        auto offer = [&](int i) {
            if (held == k && !(a[i] > v[k - 1])) return;
            int j = held < k ? held++ : k - 1;
            for (; j > 0 && v[j - 1] < a[i]; j--) { v[j] = v[j - 1]; at[j] = at[j - 1]; }
            v[j] = a[i];
            at[j] = i;
        };
        int i = 0;
        for (; i + 4 * W <= n; i += 4 * W) {  // most blocks hold nothing above the smallest of the k
            V m = vmax(vmax(load(a + i), load(a + i + W)), vmax(load(a + i + 2 * W), load(a + i + 3 * W)));
            if (held == k && !(hmax(m) > v[k - 1])) continue;
            for (int j = i; j < i + 4 * W; j++) offer(j);
        }
        for (; i < n; i++) offer(i);
    }
}

// The `top` < n largest of x [n], as an indexer chooses; for tests.
void karui_choose(const float* x, int n, int top, int32_t* out) { choose(x, n, top, out); }

// One token per row of logits [rows, n]; probability: the token's own after temperature, top-k, top-p and min-p.
void karui_sample(const float* logits, int rows, int n, const Draw* draws, int32_t* tokens, float* probabilities) {
    static thread_local Sampler sampler;
    for (int r = 0; r < rows; r++) sampler.draw(logits + (int64_t)r * n, n, draws[r], tokens[r], probabilities[r]);
}
}
