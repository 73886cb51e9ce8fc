// EAGLE-3 drafts, and how much of a draft is worth verifying.
//
// A draft is one run of the team: settled rows through the drafting layer, then a chain of its likeliest tokens with their siblings.
// karui/inference/speculative/eagle3.py is the same computation in torch, with the paper's formulas.
//
// Shapes: n settled rows, P rows in the layer's own KV before them, H hidden, A inputs of the fusion, D draft vocabulary.
#pragma once
#include <algorithm>

#include "ops.h"
#include "threads.h"

struct Drafter {  // mirrored in karui/kernels/native/draft.py, as is Draft
    int32_t hidden, heads, kv_heads, head_dim, intermediate, aux;
    float eps;
    int32_t padding;
    Linear fc, q, k, v, o, gate, up, down, head;
    const float *inv_freq, *embedding_norm, *stream_norm, *post_norm, *final_norm;
    const int64_t* ids;  // [D] the target's ids
};
struct Draft {
    int32_t rows, past, depth, width, nodes;  // `width` candidates at each depth, of all of them the `nodes` likeliest
    float least;                              // a draft that promises fewer accepted tokens is none
    const int32_t *tokens, *positions;        // [n] the token behind each row, and the row's position
    const float* aux;                         // [n, A]
    float *keys, *values;                     // [P + n + depth - 1, kv_heads * head_dim]; rows from P on are written here
    int32_t *out_tokens, *out_parents;        // [nodes] parents before children, -1: the last settled token
    float* out_log_probs;                     // [nodes] of the path down to each
};

// Seconds of a step by its rows, as they were of late.
class RowCosts {
public:
    void saw(int rows, double seconds) {
        if (rows > kRows) return;
        // A disturbed step raises it by three tenths, the next quiet one takes that back; the first may be far off the guess. What a bad
        // moment made look dear is forgotten in time: else it would never be tried again.
        for (double& s : seen_) s *= 0.998;
        seen_[rows] = std::min(seconds, (seen_[rows] ? 1.3 : 3.0) * of(rows));
    }
    double of(int rows) const {
        int known = std::min(rows, kRows);
        while (known > 1 && !seen_[known]) known--;
        return (seen_[known] ? seen_[known] : 1.0) * guess(rows) / guess(known);
    }

private:
    static constexpr int kRows = 64;
    // Before it was seen, in steps of one row: up to four rows hide behind the reading of the weights.
    static double guess(int rows) { return rows <= 4 ? 1 + 0.05 * (rows - 1) : 1.15 + 0.2 * (rows - 4); }
    double seen_[kRows + 1] = {0};
};

// How many of n nodes to verify, so that most tokens a second come of it. chances: of each being accepted, falling.
static int worth(const std::vector<float>& chances, const RowCosts& costs, int sequences) {
    double tokens = 1, best = 1 / costs.of(sequences);
    int count = 0;
    for (int k = 1; k <= (int)chances.size(); k++) {
        tokens += chances[k - 1];
        const double rate = tokens / costs.of(sequences * (1 + k));
        if (rate > best) { best = rate; count = k; }
    }
    return count;
}

// The `width` largest of n logits, the lower index first among equals; returns the logarithm of the sum of all exponentials. x goes on up to a
// multiple of W with -INFINITY.
static float largest_of(const float* x, int n, int width, int32_t* ids, float* values) {
    int held = 0;
    for (int block = 0; block < n; block += W) {
        if (held == width && !(hmax(load(x + block)) > values[width - 1])) continue;
        for (int i = block; i < std::min(block + W, n); i++) {
            const float value = x[i];
            if (held == width && !(value > values[width - 1])) continue;
            int j = held < width ? held++ : width - 1;
            for (; j > 0 && values[j - 1] < value; j--) { values[j] = values[j - 1]; ids[j] = ids[j - 1]; }
            values[j] = value;
            ids[j] = i;
        }
    }
    const V largest = set1(values[0]);
    V sum = set1(0.0f);
    for (int i = 0; i < n; i += W) sum = add(sum, vexp(sub(load(x + i), largest)));
    return values[0] + logf(hsum(sum));
}

// One query head over `count` rows of keys and values; head_dim up to 512.
static void attend(const float* query, const float* keys, const float* values, int count, int stride, int dim, float* scores, float* out) {
    float largest = -INFINITY, sum = 0;
    for (int j = 0; j < count; j++) {
        const float* key = keys + (int64_t)j * stride;
        V s = set1(0.0f);
        int d = 0;
        for (; d + W <= dim; d += W) s = fma(load(query + d), load(key + d), s);
        float total = hsum(s);
        for (; d < dim; d++) total += query[d] * key[d];
        scores[j] = total;
        largest = std::max(largest, total);
    }
    int j = 0;
    for (; j + W <= count; j += W) store(scores + j, vexp(sub(load(scores + j), set1(largest))));
    for (; j < count; j++) scores[j] = exp1(scores[j] - largest);
    for (j = 0; j < count; j++) sum += scores[j];
    std::fill(out, out + dim, 0.0f);
    for (j = 0; j < count; j++) {
        const float p = scores[j] / sum;
        const float* value = values + (int64_t)j * stride;
        for (int d = 0; d < dim; d++) out[d] += p * value[d];
    }
}

class Drafting {  // one draft; the work space stays for the next
public:
    // The number of nodes; with `costs` as many as are worth it in a step of `sequences`.
    int run(Team& team, const Drafter& drafter, const Linear& embedding, const Draft& draft, const RowCosts* costs, int sequences) {
        team_ = &team, m_ = &drafter, embedding_ = &embedding, d_ = &draft;
        own_.resize(team.size());
        stream_.resize((size_t)draft.rows * m_->hidden);
        q_.resize(m_->heads * m_->head_dim);
        mixed_.resize(q_.size());
        inner_.resize(m_->intermediate);
        up_.resize(m_->intermediate);
        logits_.resize(round_up(m_->head.n, W));
        ids_.resize(draft.width);
        log_probs_.resize(draft.width);
        found_.clear();
        team.run([](void* self, int t) { ((Drafting*)self)->draw(t); }, this);
        return keep(costs, sequences);
    }

private:
    struct Own {  // of one thread
        std::vector<float> input, normed, scores;
        Work work;
    };
    struct Node { int32_t token, parent; float score; };

    void draw(int t) {
        const Draft& d = *d_;
        part(m_->fc, d.aux, m_->aux, d.rows, stream_.data(), m_->hidden, false, t);
        team_->barrier(t);
        pass(d.tokens, d.positions, stream_.data(), d.rows, d.past, t);
        float* a = stream_.data() + (int64_t)(d.rows - 1) * m_->hidden;  // from here on this row alone
        for (int i = 0;; i++) {
            likeliest(a, i, t);
            team_->barrier(t);
            if (!more_) return;
            const int32_t position = d.positions[d.rows - 1] + i + 1;
            pass(&next_, &position, a, 1, d.past + d.rows + i, t);
        }
    }

    void part(const Linear& w, const float* x, int ldx, int rows, float* y, int ldy, bool accumulate, int t) {
        product(w, x, ldx, rows, y, ldy, accumulate, own_[t].work, t, team_->active());
    }

    // One pass: `rows` streams get keys and values, from row `at` on; the last one becomes the layer's output, which is all that is used.
    void pass(const int32_t* tokens, const int32_t* positions, float* stream, int rows, int at, int t) {
        const Drafter& m = *m_;
        const int hidden = m.hidden, hd = m.head_dim, all = m.heads * hd, kv = m.kv_heads * hd, group = m.heads / m.kv_heads;
        Own& o = own_[t];
        o.input.resize((size_t)rows * 2 * hidden);
        o.normed.resize(hidden);
        o.scores.resize(at + rows + W);
        for (int r = 0; r < rows; r++) {
            float* x = o.input.data() + (int64_t)r * 2 * hidden;
            decode_row(*embedding_, tokens[r], o.normed.data());
            rms_norm(o.normed.data(), m.embedding_norm, hidden, m.eps, x);
            rms_norm(stream + (int64_t)r * hidden, m.stream_norm, hidden, m.eps, x + hidden);
        }
        const float* last = o.input.data() + (int64_t)(rows - 1) * 2 * hidden;
        float *a = stream + (int64_t)(rows - 1) * hidden, *keys = d_->keys + (int64_t)at * kv, *values = d_->values + (int64_t)at * kv;
        part(m.k, o.input.data(), 2 * hidden, rows, keys, kv, false, t);
        part(m.v, o.input.data(), 2 * hidden, rows, values, kv, false, t);
        part(m.q, last, 2 * hidden, 1, q_.data(), all, false, t);
        team_->barrier(t);
        const int first = m.kv_heads * t / team_->active(), end = m.kv_heads * (t + 1) / team_->active();
        float cosine[256], sine[256];
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < hd / 2; i++) {
                const float angle = (float)positions[r] * m.inv_freq[i];
                cosine[i] = cosf(angle);
                sine[i] = sinf(angle);
            }
            for (int h = first; h < end; h++) rotate(keys + (int64_t)r * kv + h * hd, cosine, sine, hd, 1.0f);
        }
        for (int h = first * group; h < end * group; h++) {
            rotate(q_.data() + h * hd, cosine, sine, hd, 1.0f / sqrtf((float)hd));
            attend(q_.data() + h * hd, d_->keys + h / group * hd, d_->values + h / group * hd, at + rows, kv, hd, o.scores.data(),
                   mixed_.data() + h * hd);
        }
        team_->barrier(t);
        part(m.o, mixed_.data(), all, 1, a, hidden, true, t);
        team_->barrier(t);
        rms_norm(a, m.post_norm, hidden, m.eps, o.normed.data());
        part(m.gate, o.normed.data(), hidden, 1, inner_.data(), m.intermediate, false, t);
        part(m.up, o.normed.data(), hidden, 1, up_.data(), m.intermediate, false, t);
        const int parts = team_->active(), panels = num_panels(m.gate), from = panels * t / parts * PANEL;
        const int count = std::min(panels * (t + 1) / parts * PANEL, m.intermediate) - from;
        if (count > 0) swiglu(inner_.data() + from, up_.data() + from, count, inner_.data() + from);
        team_->barrier(t);
        part(m.down, inner_.data(), m.intermediate, 1, a, hidden, true, t);
        team_->barrier(t);
    }

    // The candidates at one depth behind stream a, the lower id first among equals, and whether the chain goes on.
    void likeliest(const float* a, int depth, int t) {
        const Drafter& m = *m_;
        const int n = m.head.n, width = d_->width;
        rms_norm(a, m.final_norm, m.hidden, m.eps, own_[t].normed.data());
        part(m.head, own_[t].normed.data(), m.hidden, 1, logits_.data(), n, false, t);
        team_->barrier(t);
        if (t) return;
        std::fill(logits_.begin() + n, logits_.end(), -INFINITY);
        const int parent = depth ? (depth - 1) * width : -1;
        const float before = (depth ? found_[parent].score : 0.0f) - largest_of(logits_.data(), n, width, ids_.data(), log_probs_.data());
        for (int j = 0; j < width; j++) found_.push_back({(int32_t)m.ids[ids_[j]], parent, before + log_probs_[j]});
        const Node& chain = found_[depth * width];
        next_ = chain.token;
        more_ = depth + 1 < d_->depth && before_all_but(d_->nodes - 1, chain.score);  // a child is never likelier than its parent
    }
    bool before_all_but(int count, float score) const {
        return std::count_if(found_.begin(), found_.end(), [&](const Node& n) { return n.score >= score; }) <= count;
    }

    int keep(const RowCosts* costs, int sequences) {
        order_.resize(found_.size());
        for (size_t i = 0; i < order_.size(); i++) order_[i] = (int)i;
        // On equal scores the earlier node, hence the parent, comes first.
        std::stable_sort(order_.begin(), order_.end(), [&](int i, int j) { return found_[i].score > found_[j].score; });
        order_.resize(std::min<size_t>(order_.size(), d_->nodes));
        chances_.clear();
        double promised = 0;
        for (int i : order_) { chances_.push_back(expf(found_[i].score)); promised += chances_.back(); }
        if (promised < d_->least) return 0;
        if (costs) order_.resize(worth(chances_, *costs, sequences));
        // The chain first, then what hangs from it: keys of an accepted chain lie where they belong.
        const int width = d_->width;
        std::sort(order_.begin(), order_.end(), [&](int i, int j) { return std::make_pair(i % width > 0, i) < std::make_pair(j % width > 0, j); });
        place_.assign(found_.size(), -1);
        for (size_t k = 0; k < order_.size(); k++) {
            const Node& node = found_[order_[k]];
            place_[order_[k]] = (int)k;
            d_->out_tokens[k] = node.token;
            d_->out_log_probs[k] = node.score;
            d_->out_parents[k] = node.parent < 0 ? -1 : place_[node.parent];
        }
        return (int)order_.size();
    }

    Team* team_ = nullptr;
    const Drafter* m_ = nullptr;
    const Linear* embedding_ = nullptr;
    const Draft* d_ = nullptr;
    std::vector<Own> own_;
    std::vector<float> stream_, q_, mixed_, inner_, up_, logits_, log_probs_, chances_;
    std::vector<int32_t> ids_;
    std::vector<Node> found_;
    std::vector<int> order_, place_;
    int32_t next_ = 0;
    bool more_ = false;
};
