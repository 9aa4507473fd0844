//! Attention on the CPU.

use crate::cpu::Cpu;
use crate::error::Result;
use crate::ops::attention::Problem;

pub(crate) fn forward(_cpu: &Cpu, _p: &Problem) -> Result<()> {
    unimplemented!()
}
