//! Log-probabilities on the GPU: a launch for the tokens of contiguous logits.

use super::device::Resources;
use super::images::logprob::Arguments;
use super::rows::Rows;
use super::table::Table;
use super::{Cuda, Run, VECTOR, check_blocks, is_aligned};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::logprob::Problem;
use crate::tensor::RawTensor;

const OP: &str = "logprob";

/// By dtype and elements per access.
pub(super) type Kernels = Table<Arguments, 2>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.dtype, c.width])
}

impl Problem {
    fn rows(&self) -> Rows<1> {
        Rows::of_dims(self.ids.layout.rank(), [&self.ids.layout])
    }
}

impl Run for Problem {
    fn check(&self) -> Result<()> {
        check_blocks(OP, "logits", self.num_tokens())?;
        if self.vocab() > i32::MAX as usize {
            let (vocab, most) = (self.vocab(), i32::MAX);
            let problem = text!("has {vocab} columns, the CUDA backend takes {most}");
            return Err(Error::unsupported(OP, "logits", problem));
        }
        if self.num_tokens() > 0 && self.rows().launches().count() > 1 {
            let strides = self.ids.layout.strides();
            let problem = text!("has strides {strides:?}, of which no three describe the tokens");
            return Err(Error::unsupported(OP, "ids", problem));
        }
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        if self.num_tokens() == 0 {
            return Ok(());
        }
        let vector = VECTOR / self.logits.dtype.size();
        let fits = self.vocab().is_multiple_of(vector) && is_aligned(&self.logits, vector);
        let width = if fits { vector } else { 1 };
        let kernel = cuda.logprob.get([self.logits.dtype as u32, width as u32])?;
        let address = |t: &RawTensor| t.ptr.addr() as u64;
        let optional = |t: &Option<RawTensor>| t.as_ref().map_or(0, address);
        let (logits, ids) = (address(&self.logits), address(&self.ids));
        for launch in self.rows().launches().take(1) {
            let [size_1, size_2] = launch.divisors();
            let arguments = Arguments {
                logits,
                plain: logits,
                ids,
                ids_i64: ids,
                logprobs: optional(&self.logprobs),
                entropies: optional(&self.entropy),
                lses: optional(&self.lse),
                dlogprobs: optional(&self.dlogprobs),
                dentropies: optional(&self.dentropy),
                length: (self.vocab() / width) as u32,
                wide_ids: u32::from(self.ids.dtype == DType::I64),
                ignore_index: self.ignore_index,
                inverse: 1.0 / self.temperature,
                softcap: self.softcap,
                bend: match self.softcap > 0.0 {
                    true => self.temperature / self.softcap,
                    false => 0.0,
                },
                has_logprobs: u32::from(self.logprobs.is_some()),
                has_entropy: u32::from(self.entropy.is_some()),
                has_lse: u32::from(self.lse.is_some()),
                differentiate: u32::from(self.differentiate),
                has_dlogprobs: u32::from(self.dlogprobs.is_some()),
                has_dentropy: u32::from(self.dentropy.is_some()),
                size_1: size_1.size,
                size_1_multiplier: size_1.multiplier,
                size_1_shift: size_1.shift,
                size_2: size_2.size,
                size_2_multiplier: size_2.multiplier,
                size_2_shift: size_2.shift,
                ids_0: launch.strides[0][0] as u64,
                ids_1: launch.strides[1][0] as u64,
                ids_2: launch.strides[2][0] as u64,
                ..Arguments::ZERO
            };
            let blocks = check_blocks(OP, "logits", launch.num_rows())?;
            // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
            unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
        }
        Ok(())
    }
}
