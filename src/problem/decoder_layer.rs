//! A decoder layer's choice of what it keeps.

/// Which activations are kept for the backward pass and which computed again. The discriminants are
/// those of the C ABI (`UNSLOTH_CHECKPOINTING_*`). Gradients have the same bits whatever is kept.
///
/// Bytes are those of a layer of Llama 3 8B in 16 bits, per token; what a layer keeps always is its
/// input, 8192 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Checkpointing {
    /// All are kept: 102,528 bytes.
    #[default]
    None = 0,
    /// All but attention's scores are kept (arXiv:2205.05198, section 5, "selective activation
    /// recomputation"). Flash attention never stores scores, so with it this is the same as keeping
    /// all.
    Selective = 1,
    /// Only each layer's input is kept, and the layer computed again (arXiv:1604.06174;
    /// arXiv:2205.05198, "full"): nothing but the input, for a third more arithmetic.
    Full = 2,
    /// What is made element by element is computed again, the norms' outputs: 86,144 bytes, for
    /// little time.
    Elementwise = 3,
    /// And gate and up, by their product: 28,800 bytes.
    Mlp = 4,
    /// And queries, keys and values; attention's output stays, which is the dearest to compute:
    /// 16,512 bytes.
    Projections = 5,
}

impl Checkpointing {
    /// The policy with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Checkpointing> {
        use Checkpointing::{Elementwise, Full, Mlp, None, Projections, Selective};
        [None, Selective, Full, Elementwise, Mlp, Projections]
            .into_iter()
            .find(|c| *c as u32 == value)
    }

    /// What of a layer it keeps.
    pub(crate) fn kept(self) -> Kept {
        let from = |order: &[Checkpointing]| order.contains(&self);
        use Checkpointing::{Elementwise, Mlp, None, Projections, Selective};
        Kept {
            norms: from(&[None, Selective]),
            gate_up: from(&[None, Selective, Elementwise]),
            qkv: from(&[None, Selective, Elementwise, Mlp]),
            attended: from(&[None, Selective, Elementwise, Mlp, Projections]),
        }
    }
}

/// What a layer keeps beside its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    /// The outputs of both norms.
    pub norms: bool,
    pub gate_up: bool,
    /// Queries, keys and values.
    pub qkv: bool,
    /// Attention's output and its `lse`, and the sum of the layer's input and the attention block,
    /// which is the MLP's input.
    pub attended: bool,
}
