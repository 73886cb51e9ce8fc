// A mixture of experts in place of a layer's feed-forward part: rows are sorted by expert, and all threads work through the experts' weights
// together, each expert read once for all of its rows. karui/inference/models/decoder.py is the same computation in torch.
//
// Shapes: T rows, E routed experts (and perhaps one shared), K choices a row, A = T * K assignments, in order of expert, then of row.
// A row's result does not depend on the other rows: products have one order of sums (gemm.cpp), choices are added in order of expert.
#pragma once
#include <math.h>

#include <functional>

#include "ops.h"
#include "threads.h"

struct Mixture {  // mirrored in karui/kernels/native/library.py
    int32_t experts, chosen, shared;  // shared: 1 when expert number E takes every row
    int32_t sigmoid, normalized, activation;
    int32_t groups, groups_kept, group_best, padding;  // experts come from so many groups, those whose `group_best` best score highest
    float scaling, share_eps, share_min;  // shares / max(sum + eps, min), times scaling
    float alpha, limit;                   // limit > 0: min(gate, limit) sigmoid(alpha gate) (clamp(up, limit) + 1) in place of SiLU(gate) up
    float residual;                       // factor on what is added to the residual stream
    const Linear* router;       // [E, hidden], float products
    const Linear* shared_gate;  // [1, hidden], float products: its sigmoid weighs the shared expert; null: 1
    const float* correction;    // [E] added to scores where experts are chosen, not where they are weighed; or null
    const Linear* expert;       // [E + shared][3]: gate, up, down
};

class Mixing {  // the work space of one model
public:
    int max_padded(const Mixture& m) const {
        int most = std::max(m.router->k_padded, m.shared_gate ? m.shared_gate->k_padded : 0);
        for (int i = 0; i < 3 * (m.experts + m.shared); i++) most = std::max(most, m.expert[i].k_padded);
        return most;
    }

    // By one thread, before the team starts: space for `rows` rows of any of the layers.
    void prepare(const Mixture* const* layers, int count, int rows, int threads, bool own) {
        lists_.resize(own ? threads : 1);
        own_ = own;
        size_t k = 0, active = 0, wide = 0;
        for (int l = 0; l < count; l++) {
            if (!layers[l]) continue;
            const Mixture& m = *layers[l];
            most_ = std::max(most_, max_padded(m));
            k = std::max(k, (size_t)m.chosen + m.shared);
            active = std::max(active, std::min((size_t)m.experts + m.shared, rows * k));
            for (int e = 0; e < m.experts + m.shared; e++)
                wide = std::max(wide, (size_t)std::max(round_up(m.expert[3 * e].n, CHUNK), m.expert[3 * e + 2].k_padded));
            scores_.resize(std::max(scores_.size(), (size_t)rows * round_up(m.experts, PANEL)));
        }
        const size_t all = rows * k, tiled = round_up((int)(all + active * (TILE - 1)), TILE);
        wide_ = (int)std::max(wide, (size_t)wide_);
        grow(gate_, all * wide_ + most_), grow(up_, all * wide_ + most_), grow(out_, all * most_), grow(x_, all * most_ + most_);
        for (Codes* c : {&in_[0], &in_[1], &down_}) c->need(tiled, most_);
        shared_.resize(rows);
        for (Lists& list : lists_) {
            list.choice.resize(all);
            list.share.resize(all);
            list.row.resize(all);
            list.slot.resize(all);
        }
    }

    // h [T, ldh] += the mixture of x [T, ldx]. By all threads; `x` may be each thread's own copy of the same rows. `panel`: this thread's.
    void run(Team& team, const Mixture& m, const float* x, int ldx, int rows, float* h, int ldh, float* panel, int t, int n) {
        const Activations floats = {x, ldx, nullptr, nullptr, nullptr};
        const int ld = round_up(m.experts, PANEL), H = m.router->k;
        int first, last;
        share(num_panels(*m.router), t, n, first, last);
        multiply(*m.router, floats, rows, first, last, scores_.data(), ld, false, panel);
        if (m.shared_gate && t == n - 1) multiply(*m.shared_gate, floats, rows, 0, 1, shared_.data(), 1, false, panel);
        team.barrier(t);
        Lists& list = lists_[own_ ? t : 0];
        if (own_ || t == 0) {
            choose(m, rows, ld, list);
            sort(m, rows, list, n);
        }
        if (!own_) team.barrier(t);
        share((int)list.row.size(), t, n, first, last);
        for (int i = first; i < last; i++) gather(m, list, i, x, ldx, H);
        if (t == 0) next_[1].store(0);
        team.barrier(t);
        gate_up(team, m, list, panel, t, n);
        if (t == 0) next_[0].store(0);
        for (int i; (i = next_[1].fetch_add(1)) < (int)list.down.size();) down(m, list, list.down[i], panel);
        team.barrier(t);
        share(rows, t, n, first, last);
        const int k = m.chosen + m.shared;
        for (int r = first; r < last; r++) {
            float* to = h + (int64_t)r * ldh;
            for (int d = 0; d < H; d += W) {
                V sum = set1(0.0f);
                for (int j = 0; j < k; j++) {
                    const int slot = list.slot[r * k + j];
                    sum = fma(load(&out_[(int64_t)slot * most_ + d]), set1(list.share[slot]), sum);
                }
                sum = mul(sum, set1(m.residual));
                if (d + W <= H) { store(to + d, add(load(to + d), sum)); continue; }
                float rest[W];
                store(rest, sum);
                for (int i = d; i < H; i++) to[i] += rest[i - d];
            }
        }
        team.barrier(t);
    }

private:
    struct Codes {
        std::vector<int8_t> codes;
        std::vector<float> scale;
        std::vector<int32_t> sum;
        void need(size_t rows, size_t width) { grow(codes, rows * width), grow(scale, rows * (width / 16)), grow(sum, rows * (width / 16)); }
    };
    struct Active { int expert, first, rows, tile; };  // its assignments, and where its rows of codes begin
    struct Task { int active, first, last; };          // units of an expert's outputs
    struct Lists {                                     // by assignment but for choice: [T, K] experts, slot: [T, K] assignment
        std::vector<int32_t> choice, row, slot;
        std::vector<float> share;
        std::vector<int32_t> counts, owner;
        std::vector<float> score, rank, group;
        std::vector<Active> active;
        std::vector<Task> gate_up, down;
        bool fused;
    };
    template <typename X> static void grow(std::vector<X>& v, size_t size) { if (v.size() < size) v.resize(size); }
    // Whether a thread that has made some columns of gate and up can go on to down's codes of them at once; `unit` columns at a time.
    static bool fuses(const Linear* e) {
        return integer(e[2]) && !e[2].per_token && e[2].k == e[2].k_padded && e[0].n % unit(e) == 0;
    }
    static int unit(const Linear* e) { return integer(e[2]) ? std::max(CHUNK, e[2].block) : CHUNK; }

    // Takes experts out of the ranking whose group is not among the best; the first of equals is kept.
    static void keep_groups(const Mixture& m, float* rank, std::vector<float>& group) {
        const int each = m.experts / m.groups;
        group.resize(m.groups + each);
        float* own = group.data() + m.groups;
        for (int g = 0; g < m.groups; g++) {
            std::partial_sort_copy(rank + g * each, rank + (g + 1) * each, own, own + m.group_best, std::greater<float>());
            group[g] = 0.0f;
            for (int i = 0; i < m.group_best; i++) group[g] += own[i];
        }
        for (int g = 0; g < m.groups; g++) {
            int ahead = 0;
            for (int i = 0; i < m.groups; i++) ahead += group[i] > group[g] || (group[i] == group[g] && i < g);
            if (ahead >= m.groups_kept) std::fill_n(rank + g * each, each, -INFINITY);
        }
    }

    // The experts of each row and their shares, largest score first.
    void choose(const Mixture& m, int rows, int ld, Lists& list) {
        const int k = m.chosen + m.shared;
        std::vector<float>& rank = list.rank;
        rank.resize(m.experts);
        list.score.resize((size_t)rows * (m.experts + 1));
        for (int r = 0; r < rows; r++) {
            float* score = &list.score[(size_t)r * (m.experts + 1)];
            memcpy(score, &scores_[(int64_t)r * ld], m.experts * 4);
            float top = score[0], sum = 0.0f;
            for (int e = 1; e < m.experts; e++) top = std::max(top, score[e]);
            for (int e = 0; e < m.experts; e++) {
                score[e] = m.sigmoid ? 1.0f / (1.0f + expf(-score[e])) : expf(score[e] - top);
                sum += score[e];
            }
            for (int e = 0; e < m.experts; e++) {
                if (!m.sigmoid) score[e] /= sum;
                rank[e] = m.correction ? score[e] + m.correction[e] : score[e];
            }
            if (m.groups > 1) keep_groups(m, rank.data(), list.group);
            float total = 0.0f;
            for (int j = 0; j < m.chosen; j++) {
                int best = -1;
                for (int e = 0; e < m.experts; e++)
                    if (rank[e] > -INFINITY && (best < 0 || rank[e] > rank[best])) best = e;
                if (best < 0) best = j;  // scores that are not numbers
                list.choice[r * k + j] = best;
                rank[best] = -INFINITY;
                total += score[best];
            }
            const float divisor = m.normalized ? std::max(total + m.share_eps, m.share_min) : 1.0f;
            for (int e = 0; e < m.experts; e++) score[e] = score[e] / divisor * m.scaling;
            if (!m.shared) continue;
            list.choice[r * k + m.chosen] = m.experts;
            score[m.experts] = m.shared_gate ? 1.0f / (1.0f + expf(-shared_[r])) : 1.0f;
        }
    }

    // Assignments by expert, and the tasks of both products.
    void sort(const Mixture& m, int rows, Lists& list, int threads) {
        const int k = m.chosen + m.shared, all = rows * k, experts = m.experts + m.shared;
        list.counts.assign(experts + 1, 0);
        for (int i = 0; i < all; i++) list.counts[list.choice[i] + 1]++;
        list.active.clear();
        list.owner.resize(all);
        list.row.resize(all);
        int tile = 0;
        for (int e = 0, at = 0; e < experts; e++) {
            const int count = list.counts[e + 1];
            list.counts[e] = at;
            if (count) {
                list.active.push_back({e, at, count, tile});
                std::fill_n(list.owner.begin() + at, count, (int)list.active.size() - 1);
                tile += round_up(count, TILE);
            }
            at += count;
        }
        for (int r = 0; r < rows; r++) {
            std::sort(list.choice.begin() + r * k, list.choice.begin() + (r + 1) * k);
            for (int j = 0; j < k; j++) {
                const int e = list.choice[r * k + j], slot = list.counts[e]++;
                list.row[slot] = r;
                list.slot[r * k + j] = slot;
                list.share[slot] = list.score[(size_t)r * (m.experts + 1) + e];
            }
        }
        list.fused = true;
        for (const Active& a : list.active) list.fused &= fuses(m.expert + 3 * a.expert);
        cut(list, list.gate_up, threads, [&](const Active& a) {
            const Linear* e = m.expert + 3 * a.expert;
            return (e->n + unit(e) - 1) / unit(e);
        });
        cut(list, list.down, threads, [&](const Active& a) { return num_panels(m.expert[3 * a.expert + 2]); });
    }
    template <typename F> static void cut(const Lists& list, std::vector<Task>& tasks, int threads, F units) {
        int total = 0;
        for (const Active& a : list.active) total += units(a);
        const int grain = std::max(1, total / (8 * threads));
        tasks.clear();
        for (int i = 0; i < (int)list.active.size(); i++)
            for (int u = 0, end = units(list.active[i]); u < end; u += grain) tasks.push_back({i, u, std::min(u + grain, end)});
    }

    // One assignment's row as its expert's gate and up read it.
    void gather(const Mixture& m, const Lists& list, int i, const float* x, int ldx, int hidden) {
        const Active& a = list.active[list.owner[i]];
        const Linear* e = m.expert + 3 * a.expert;
        const float* row = x + (int64_t)list.row[i] * ldx;
        for (int j = 0; j < 2; j++)
            if (integer(e[j]) && (j == 0 || !same_codes(e[0], e[1]))) encode(e[j], in_[j], a, i - a.first, row);
        if (integer(e[0]) && integer(e[1])) return;
        float* to = &x_[(int64_t)i * most_];
        memcpy(to, row, hidden * 4);
        std::fill(to + hidden, to + std::max(e[0].k_padded, e[1].k_padded), 0.0f);
    }
    void encode(const Linear& w, Codes& to, const Active& a, int row, const float* x) {
        quantize_row(x, w.k_padded, w.block, w.per_token, factor(w), row_of(w, to, a, row));
    }
    CodeRow row_of(const Linear& w, Codes& of, const Active& a, int row) const {
        const int64_t blocks = (int64_t)a.tile * (most_ / 16);
        return tiled_row(&of.codes[(int64_t)a.tile * most_], &of.scale[blocks], &of.sum[blocks], row, w.k_padded, w.k_padded / w.block);
    }
    Activations read(const Codes& from, const Active& a, const std::vector<float>& x, int ld) const {
        return {&x[(int64_t)a.first * ld], ld, &from.codes[(int64_t)a.tile * most_], &from.scale[(int64_t)a.tile * (most_ / 16)],
                &from.sum[(int64_t)a.tile * (most_ / 16)]};
    }

    void gate_up(Team& team, const Mixture& m, Lists& list, float* panel, int t, int n) {
        for (int i; (i = next_[0].fetch_add(1)) < (int)list.gate_up.size();) {
            const Task& task = list.gate_up[i];
            const Active& a = list.active[task.active];
            const Linear* e = m.expert + 3 * a.expert;
            const int step = unit(e), first = task.first * step, last = std::min(task.last * step, e->n);
            for (int j = 0; j < 2; j++)
                multiply(e[j], read(in_[j && !same_codes(e[0], e[1])], a, x_, most_), a.rows, first / PANEL, (last + PANEL - 1) / PANEL,
                         &(j ? up_ : gate_)[(int64_t)a.first * wide_], wide_, false, panel);
            for (int r = 0; r < a.rows && list.fused; r++) code_piece(e[2], a, r, first, last, glu(m, a, r, first, last));
        }
        team.barrier(t);
        if (list.fused) return;
        int first, last;
        share((int)list.row.size(), t, n, first, last);
        for (int i = first; i < last; i++) {
            const Active& a = list.active[list.owner[i]];
            const Linear* e = m.expert + 3 * a.expert;
            float* g = glu(m, a, i - a.first, 0, e->n);
            std::fill(g + e->n, g + std::max(round_up(e->n, CHUNK), e[2].k_padded), 0.0f);
            if (integer(e[2])) encode(e[2], down_, a, i - a.first, g);
        }
        team.barrier(t);
    }
    // Columns first .. last of an assignment's gate and up become down's input, in gate's place; returns its row.
    float* glu(const Mixture& m, const Active& a, int row, int first, int last) {
        float *g = &gate_[(int64_t)(a.first + row) * wide_], *u = &up_[(int64_t)(a.first + row) * wide_];
        if (m.limit > 0) clamped_glu(g + first, u + first, last - first, m.alpha, m.limit, g + first);
        else gated((Activation)m.activation, g + first, u + first, last - first, g + first);
        return g;
    }
    void code_piece(const Linear& down, const Active& a, int row, int first, int last, const float* g) {
        quantize_row(g + first, last - first, down.block, false, factor(down), from_input(row_of(down, down_, a, row), first, down.block));
    }
    void down(const Mixture& m, const Lists& list, const Task& task, float* panel) {
        const Active& a = list.active[task.active];
        multiply(m.expert[3 * a.expert + 2], read(down_, a, gate_, wide_), a.rows, task.first, task.last,
                 &out_[(int64_t)a.first * most_], most_, false, panel);
    }

    std::vector<Lists> lists_;
    std::vector<float> scores_, shared_, x_, gate_, up_, out_;
    Codes in_[2], down_;
    std::atomic<int> next_[2] = {{0}, {0}};
    int most_ = 0, wide_ = 0;
    bool own_ = false;
};
