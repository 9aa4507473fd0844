//! What ptxas reports of kernels.

use serde::{Deserialize, Serialize};

use super::Occupancy;
use crate::cubin::{Boxes, Wgmma};

/// What one kernel uses on one architecture, as ptxas reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The image.
    pub image: String,
    /// The kernel's symbol.
    pub kernel: String,
    /// The architecture, such as `90a`.
    pub architecture: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory that a thread's stack frame takes.
    pub stack_bytes: u32,
    /// Bytes of registers written to local memory.
    pub spill_store_bytes: u32,
    /// Bytes of registers read back.
    pub spill_load_bytes: u32,
    /// Bytes of static shared memory; dynamic shared memory is the launch's.
    pub static_shared_bytes: u32,
    /// What the compiler warned of, such as serialised wgmma (C7510).
    pub warnings: Vec<String>,
    /// How wgmma are arranged, in kernels that have any.
    pub wgmma: Option<Wgmma>,
    /// How boxes are copied, in kernels that have any.
    pub boxes: Option<Boxes>,
    /// How many blocks run at once, on architectures that are known.
    pub occupancy: Option<Occupancy>,
}

/// Reads ptxas' report.
pub(super) fn usage(image: &str, architecture: &str, log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    let number_before = |line: &str, what: &str| -> Option<u32> {
        let (head, _) = line.split_once(what)?;
        head.split_whitespace().last()?.parse().ok()
    };
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            all.push(Usage {
                image: image.to_string(),
                kernel: rest.split('\'').next().unwrap_or_default().to_string(),
                architecture: architecture.to_string(),
                registers: 0,
                stack_bytes: 0,
                spill_store_bytes: 0,
                spill_load_bytes: 0,
                static_shared_bytes: 0,
                warnings: Vec::new(),
                wgmma: None,
                boxes: None,
                occupancy: None,
            });
            continue;
        }
        // ptxas names the function in a warning; else the one being compiled is meant.
        let named = all
            .iter()
            .position(|u| line.contains(&format!("'{}'", u.kernel)));
        let last = all.len().checked_sub(1);
        let Some(current) = named.or(last).and_then(|i| all.get_mut(i)) else {
            continue;
        };
        if line.contains("warning") || line.contains("(C7") {
            current.warnings.push(line.trim().to_string());
            continue;
        }
        let fields = [
            (" bytes stack frame", &mut current.stack_bytes),
            (" bytes spill stores", &mut current.spill_store_bytes),
            (" bytes spill loads", &mut current.spill_load_bytes),
            (" registers", &mut current.registers),
            (" bytes smem", &mut current.static_shared_bytes),
        ];
        for (what, field) in fields {
            if let Some(n) = number_before(line, what) {
                *field = n;
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let log = "\
ptxas info    : Compiling entry function 'rows' for 'sm_90a'
ptxas info    : Function properties for rows
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 29 registers, used 1 barriers, 16 bytes smem
ptxas warning : Registers are spilled to local memory in function 'rows', 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'any' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'rows'
ptxas info    : Used 40 registers, used 0 barriers
";
        let [rows, any] = usage("image", "90a", log).try_into().unwrap();
        assert_eq!(
            (rows.registers, rows.stack_bytes, rows.static_shared_bytes),
            (29, 8, 16)
        );
        assert_eq!((rows.spill_store_bytes, rows.spill_load_bytes), (4, 12));
        assert_eq!(rows.warnings.len(), 2);
        assert_eq!((any.registers, any.warnings.len()), (40, 0));
    }
}
