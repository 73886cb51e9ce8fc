// Medusa's drafts: the heads' rows go through the vocabulary's projection together, and the likeliest paths of their distributions' product
// become a tree. karui/inference/speculative/medusa.py is the same computation in torch, with the paper's formulas.
//
// Shapes: M heads, L blocks a head, H hidden, D tokens that can be drafted.
#pragma once
#include "draft.h"

struct Medusa {  // mirrored in karui/kernels/native/library.py
    int32_t hidden, heads, layers, vocab;
    int32_t projections, padding;  // 0: the target's head, 1: one for all heads, M: one a head
    const Linear *blocks, *projection;  // [M, L], [projections]
    const int64_t* ids;  // [D] the target's ids; null: all, in order
};

class MedusaDrafting {  // one draft; the work space stays for the next
public:
    // As Drafting::run: draft.aux is [H], the target's last hidden state; of `draft` also depth (heads used), width, nodes, least and out_* count.
    int run(Team& team, const Medusa& medusa, const Linear& head, const Draft& draft, const RowCosts* costs, int sequences) {
        team_ = &team, m_ = &medusa, d_ = &draft;
        projection_ = medusa.projections ? medusa.projection : &head;
        heads_ = std::min(draft.depth, medusa.heads);
        width_ = std::min(draft.width, medusa.vocab);
        ld_ = round_up(medusa.vocab, W);
        own_.resize(team.size());
        const size_t states = round_up(heads_ * medusa.hidden, W);
        x_.assign(states, 0.0f);
        z_.assign(states, 0.0f);
        for (int i = 0; i < heads_; i++) std::copy_n(draft.aux, medusa.hidden, x_.begin() + (int64_t)i * medusa.hidden);
        logits_.resize((size_t)heads_ * ld_);
        ids_.resize((size_t)heads_ * width_);
        log_probs_.resize(ids_.size());
        team.run([](void* self, int t) { ((MedusaDrafting*)self)->guess(t); }, this);
        return keep(costs, sequences);
    }

private:
    struct Node { int32_t parent, depth, rank; float score; bool chain; };

    void guess(int t) {
        const Medusa& m = *m_;
        const int H = m.hidden, parts = team_->active();
        Work& work = own_[t];
        const int lanes = (int)x_.size() / W, from = lanes * t / parts * W, to = lanes * (t + 1) / parts * W;
        for (int l = 0; l < m.layers; l++) {
            for (int i = 0; i < heads_; i++)
                product(m.blocks[i * m.layers + l], &x_[(int64_t)i * H], H, 1, &z_[(int64_t)i * H], H, false, work, t, parts);
            team_->barrier(t);
            for (int i = from; i < to; i += W) {  // x + SiLU(z)
                const V z = load(&z_[i]);
                store(&x_[i], add(load(&x_[i]), div(z, add(set1(1.0f), vexp(sub(set1(0.0f), z))))));
            }
            team_->barrier(t);
        }
        if (m.projections <= 1) product(*projection_, x_.data(), H, heads_, logits_.data(), ld_, false, work, t, parts);
        else for (int i = 0; i < heads_; i++)
            product(projection_[i], &x_[(int64_t)i * H], H, 1, &logits_[(int64_t)i * ld_], ld_, false, work, t, parts);
        team_->barrier(t);
        for (int i = t; i < heads_; i += parts) {
            float *logits = &logits_[(int64_t)i * ld_], *values = &log_probs_[(int64_t)i * width_];
            std::fill(logits + m.vocab, logits + ld_, -INFINITY);
            const float all = largest_of(logits, m.vocab, width_, &ids_[(int64_t)i * width_], values);
            for (int j = 0; j < width_; j++) values[j] -= all;
        }
    }

    float chance(int depth, int rank) const { return log_probs_[(int64_t)depth * width_ + rank]; }

    // The likeliest paths: what is taken offers its next sibling and its first child, neither of which is likelier.
    int keep(const RowCosts* costs, int sequences) {
        found_.clear();
        offered_.assign(1, {-1, 0, 0, chance(0, 0), true});
        while ((int)found_.size() < d_->nodes && !offered_.empty()) {
            const auto best = std::max_element(offered_.begin(), offered_.end(), [](const Node& a, const Node& b) { return a.score < b.score; });
            const Node n = *best;
            offered_.erase(best);
            const float above = n.parent < 0 ? 0.0f : found_[n.parent].score;
            found_.push_back(n);
            if (n.rank + 1 < width_) offered_.push_back({n.parent, n.depth, n.rank + 1, above + chance(n.depth, n.rank + 1), false});
            if (n.depth + 1 < heads_) offered_.push_back({(int)found_.size() - 1, n.depth + 1, 0, n.score + chance(n.depth + 1, 0), n.chain});
        }
        chances_.clear();
        double promised = 0;
        for (const Node& n : found_) { chances_.push_back(expf(n.score)); promised += chances_.back(); }
        if (promised < d_->least) return 0;
        if (costs) found_.resize(worth(chances_, *costs, sequences));
        // The chain first, then what hangs from it: keys of an accepted chain lie where they belong.
        place_.assign(found_.size(), -1);
        int count = 0;
        for (const bool chain : {true, false})
            for (size_t i = 0; i < found_.size(); i++) {
                const Node& n = found_[i];
                if (n.chain != chain) continue;
                const int32_t id = ids_[(int64_t)n.depth * width_ + n.rank];
                d_->out_tokens[count] = m_->ids ? (int32_t)m_->ids[id] : id;
                d_->out_log_probs[count] = n.score;
                d_->out_parents[count] = n.parent < 0 ? -1 : place_[n.parent];
                place_[i] = count++;
            }
        return count;
    }

    Team* team_ = nullptr;
    const Medusa* m_ = nullptr;
    const Linear* projection_ = nullptr;
    const Draft* d_ = nullptr;
    int heads_ = 0, width_ = 0, ld_ = 0;
    std::vector<Work> own_;
    std::vector<float> x_, z_, logits_, log_probs_, chances_;
    std::vector<int32_t> ids_;
    std::vector<Node> found_, offered_;
    std::vector<int> place_;
};
