//! Problems: what validation makes of an operation's arguments, one file per operation.
//!
//! A problem is plain data: sizes, flags and raw tensors, known to be consistent, and all that a
//! backend needs to know. A backend answers it with a [`Plan`] or with the reason why it has none.

pub(crate) mod accumulate;
pub(crate) mod argmax;
pub(crate) mod attention;
pub(crate) mod attention_merge;
pub(crate) mod cast;
pub(crate) mod chunked;
pub(crate) mod collective;
pub(crate) mod cross_entropy;
pub(crate) mod decoder_layer;
pub(crate) mod embedding;
pub(crate) mod kv_cache;
pub(crate) mod layer_norm;
pub(crate) mod linear;
pub(crate) mod linear_cross_entropy;
pub(crate) mod linear_logprob;
pub(crate) mod logprob;
pub(crate) mod mlp;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod qk_norm_rope;
pub(crate) mod quantize;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod swiglu;
pub(crate) mod weight_repack;

use crate::backend::{Implementation, Stream};
use crate::error::Result;
use crate::tensor::Scratch;

/// A backend's choice of how to run a problem. What is asked about a call and what the call does
/// follow from one plan, and nothing else launches.
///
/// It is made from shapes, strides, dtypes and addresses' alignment; data is not looked at before
/// [`Plan::launch`].
pub(crate) trait Plan {
    fn implementation(&self) -> Implementation;

    /// Bytes of workspace without which the problem is not run.
    fn needed(&self) -> usize {
        0
    }

    /// Bytes of workspace with which it runs fastest; at least what is needed. More is of no use.
    ///
    /// # Errors
    /// A library that has to be asked fails.
    fn useful(&self) -> Result<usize> {
        Ok(self.needed())
    }

    /// Bytes of workspace with which every problem runs fastest that has these tensors, as many
    /// tokens in all and no more sequences than this one, however long these are.
    ///
    /// # Errors
    /// As [`Plan::useful`].
    fn useful_for_any(&self) -> Result<usize> {
        self.useful()
    }

    /// Of `given` bytes of workspace, more than what is needed, those that a launch uses: here all that
    /// are of use or, where these are not there, what is needed. The rest is not looked at.
    ///
    /// # Errors
    /// As [`Plan::useful`].
    fn used(&self, given: usize) -> Result<usize> {
        let useful = self.useful()?;
        Ok(match given >= useful {
            true => useful,
            false => self.needed(),
        })
    }

    /// Bytes of workspace with which a launch takes no memory of the host's own: at least what is
    /// needed. For operations made of several, which would have written when a part finds none.
    fn without_allocating(&self) -> usize {
        self.needed()
    }

    /// Sees whether there is memory of the host's for what a launch takes in spite of that, inside
    /// libraries that end the process where there is none, and whether lengths and positions in the
    /// host's memory are sound.
    ///
    /// # Errors
    /// There is not, or they are not.
    fn probe(&self) -> Result<()> {
        Ok(())
    }

    /// Runs or queues the problem, whose data has been checked. `scratch` is the caller's memory:
    /// what is needed, or what [`Plan::used`] said.
    ///
    /// # Errors
    /// The launch failed; on the CPU also what only the data tells, before anything was written.
    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()>;

    /// Lets `stream` wait for what a launch has left running beside it, where what was to wait for that
    /// is not queued any more, as something else has failed.
    fn settle(&self, _stream: Stream) {}
}

/// A backend that has an implementation of problems `P`.
pub(crate) trait Plans<P> {
    type Plan<'a>: Plan
    where
        Self: 'a;

    /// Chooses.
    ///
    /// # Errors
    /// No implementation serves this problem.
    fn plan(&self, problem: P) -> Result<Self::Plan<'_>>;
}
