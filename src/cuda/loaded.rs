//! What is loaded on a device once for all contexts of the process.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::device::Resources;
use super::driver::Driver;
use super::{Loaded, check_ordinal, images, unavailable};
use crate::error::Result;

/// Defines `Loaded`, with a field for each of the modules named: what its `kernels` makes of the device's
/// images. `mod.rs` names them, beside the modules.
macro_rules! operations {
    ($($operation:ident),* $(,)?) => {
        /// Every operation's kernels on one device, ready to launch, and the libraries that serve some.
        ///
        /// The last context of the device that goes unloads them: until then graphs that captured launches
        /// of them remain valid.
        pub(crate) struct Loaded {
            $($operation: $operation::Kernels,)*
            resources: device::Resources,
        }

        impl Loaded {
            fn of(resources: device::Resources) -> Result<Loaded> {
                Ok(Loaded {
                    $($operation: $operation::kernels(&resources)?,)*
                    resources,
                })
            }
        }
    };
}
pub(super) use operations;

// SAFETY: the fields are handles of the driver, which any thread may use.
unsafe impl Send for Loaded {}
// SAFETY: as above, several at a time.
unsafe impl Sync for Loaded {}

/// What live contexts use, by device ordinal.
static DEVICES: Mutex<Vec<(i32, Weak<Loaded>)>> = Mutex::new(Vec::new());

impl Loaded {
    /// What a context of the process has loaded on the device, or else loaded now. Contexts that are
    /// made at the same time wait for one another.
    ///
    /// # Errors
    /// No driver, no such device, no image that fits it, or the driver refuses.
    pub fn on_device(op: &'static str, ordinal: i32) -> Result<Arc<Loaded>> {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let known = devices.iter().find(|(device, _)| *device == ordinal);
        if let Some(loaded) = known.and_then(|(_, loaded)| loaded.upgrade()) {
            return Ok(loaded);
        }
        let loaded = Arc::new(Loaded::load(op, ordinal)?);
        devices.retain(|(device, _)| *device != ordinal);
        devices.push((ordinal, Arc::downgrade(&loaded)));
        Ok(loaded)
    }

    /// Loads every image that fits the device.
    pub fn load(op: &'static str, ordinal: i32) -> Result<Loaded> {
        let start = std::time::Instant::now();
        let driver = Driver::get(op)?;
        check_ordinal(op, driver, ordinal)?;
        let ((major, minor), (needed, _)) = (driver.version, images::TOOLKIT);
        if major < needed {
            let reason = format!(
                "the driver supports CUDA {major}.{minor}, the kernels of this build need {needed}.0"
            );
            return Err(unavailable(op, reason));
        }
        let loaded = Loaded::of(Resources::load(op, driver, ordinal)?)?;
        tracing::info!(
            "cuda: loaded {} images on device {ordinal} in {} ms; driver {major}.{minor}, cuBLASLt {}",
            loaded.resources.num_images(),
            start.elapsed().as_millis(),
            if loaded.linear.has_library() {
                "found"
            } else {
                "not found: products of many rows are slower without it"
            },
        );
        Ok(loaded)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(_entered) = self.resources.primary.enter("context") {
            self.linear.close();
        }
    }
}
