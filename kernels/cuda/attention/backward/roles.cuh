// dK and dV alone, of heads of more than 128: two warpgroups with a role each, for 64 keys,
//   values: P = exp(scale K Q^T - lse), dV = P^T dO;
//   keys:   dP = V dO^T, dS = P (dP - delta), dK = scale dS^T Q.
// A gradient of 64 keys takes most of the registers that a thread can have, so P goes from one role
// to the other through shared memory, in 16 bits. Exponentials run under dV, the arithmetic of dS
// under dK, and both under the other role's products.
#pragma once

#include "role.cuh"
#include "roles_shared.cuh"

namespace unsloth {

template <int D, int DV, class T>
struct Roles : Role<D, DV, T, RolesShared<D, DV, T>> {
  using Base = Role<D, DV, T, RolesShared<D, DV, T>>;
  using Base::Base, Base::kS, Base::p, Base::shared, Base::w, Base::turns, Base::parity_at;
  using Base::exponentiate, Base::pass_on, Base::convert, Base::multiply_probabilities;
  using Base::fresh, Base::release, Base::multiply_gradient;
  using Base::wait_keys, Base::write, Base::clear;
  template <int kRole, int kColumns>
  __device__ __forceinline__ void wait_rows(Mbarrier &full, T *tile, uint32_t parity, int m) {
    Base::template wait_rows<kRole, kColumns>(full, tile, parity, m);
  }

  // Of the blocks of queries of every head that reads the keys.

  // dV.
  __device__ __forceinline__ void compute_values(float (&dv)[DV / 2]) {
    const int steps = (turns.m_max - turns.m_min) * p.group;
    float x[kS];
    uint32_t packed[kS / 2];
    wait_keys();
    int m = turns.m_min;
    wait_rows<kValues, D>(shared.q_full[0], shared.q[0], 0, m);
    this->template multiply_scores<D>(x, shared.k, shared.q[0]);
    wgmma_wait<0>();
    hold(x);
#pragma unroll 1
    for (int step = 0; step + 1 < steps; ++step) {
      // The compiler keeps descriptors in uniform registers as long as it can tell that the whole
      // warp has the same.
      const int stage = __shfl_sync(0xffffffff, step & 1, 0), other = stage ^ 1;
      const int next = turns.after(m);
      exponentiate(x, stage, m, step);
      shared.probabilities_empty[stage].wait(parity_at(step) ^ 1);
      wgmma_wait<0>();
      hold(dv);
      hold(packed);
      if (step > 0) release(shared.dout_empty[other]);
      convert(x, packed);
      pass_on(x, packed, stage, m, step);
      release(shared.q_empty[stage]);
      release(shared.probabilities_full[stage]);
      wait_rows<kValues, D>(shared.q_full[other], shared.q[other], parity_at(step + 1), next);
      this->template multiply_scores<D>(x, shared.k + fresh(stage), shared.q[other]);
      wait_rows<kValues, DV>(shared.dout_full[stage], shared.dout[stage], parity_at(step), m);
      multiply_gradient(dv, packed, shared.dout[stage]);
      wgmma_wait<1>();
      hold(x);
      m = next;
    }
    const int step = steps - 1, stage = step & 1;
    exponentiate(x, stage, m, step);
    shared.probabilities_empty[stage].wait(parity_at(step) ^ 1);
    wgmma_wait<0>();
    hold(dv);
    hold(packed);
    convert(x, packed);
    pass_on(x, packed, stage, m, step);
    release(shared.probabilities_full[stage]);
    wait_rows<kValues, DV>(shared.dout_full[stage], shared.dout[stage], parity_at(step), m);
    multiply_gradient(dv, packed, shared.dout[stage]);
    wgmma_wait<0>();
    hold(dv);
    hold(packed);
  }

  // dK.
  __device__ __forceinline__ void compute_keys(float (&dk)[D / 2]) {
    const int steps = (turns.m_max - turns.m_min) * p.group;
    float y[kS];
    uint32_t packed[kS / 2];
    wait_keys();
    int m = turns.m_min;
    wait_rows<kKeysRole, DV>(shared.dout_full[0], shared.dout[0], 0, m);
    this->template multiply_scores<DV>(y, shared.v, shared.dout[0]);
    wgmma_wait<0>();
    hold(y);
    release(shared.dout_empty[0]);
#pragma unroll 1
    for (int step = 0; step + 1 < steps; ++step) {
      const int stage = __shfl_sync(0xffffffff, step & 1, 0), other = stage ^ 1;
      const int next = turns.after(m);
      shared.q_full[stage].wait(parity_at(step));
      shared.probabilities_full[stage].wait(parity_at(step));
      multiply_probabilities(y, stage, stage);
      release(shared.probabilities_empty[stage]);
      wgmma_wait<0>();
      hold(dk);
      hold(packed);
      if (step > 0) release(shared.q_empty[other]);
      convert(y, packed);
      wait_rows<kKeysRole, DV>(shared.dout_full[other], shared.dout[other], parity_at(step + 1),
                               next);
      this->template multiply_scores<DV>(y, shared.v + fresh(stage), shared.dout[other]);
      multiply_gradient(dk, packed, shared.q[stage]);
      wgmma_wait<1>();
      hold(y);
      release(shared.dout_empty[other]);
      m = next;
    }
    const int step = steps - 1, stage = step & 1;
    shared.q_full[stage].wait(parity_at(step));
    shared.probabilities_full[stage].wait(parity_at(step));
    multiply_probabilities(y, stage, stage);
    wgmma_wait<0>();
    hold(dk);
    hold(packed);
    convert(y, packed);
    multiply_gradient(dk, packed, shared.q[stage]);
    wgmma_wait<0>();
    hold(dk);
    hold(packed);
  }

  __device__ __forceinline__ void run(int role) {
    const bool any = turns.m_min < turns.m_max;
    if (role == kValues) {
      float dv[DV / 2];
      clear(dv);
      if (any) compute_values(dv);
      write(dv, 1.0f, p.dv, p.dv_batch_stride, p.dv_sequence_stride, p.dv_head_stride,
            p.head_dim_v);
    } else {
      float dk[D / 2];
      clear(dk);
      if (any) compute_keys(dk);
      write(dk, p.scale, p.dk, p.dk_batch_stride, p.dk_sequence_stride, p.dk_head_stride,
            p.head_dim);
    }
  }
};

}  // namespace unsloth
