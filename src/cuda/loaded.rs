//! What is loaded on a device once for all contexts of the process.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::Resources;
use super::driver::Driver;
use super::{Loaded, check_ordinal, images, unavailable};
use crate::alloc::{Shared, push};
use crate::error::{Result, text};

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
static DEVICES: Mutex<Vec<(i32, Shared<Loaded>)>> = Mutex::new(Vec::new());

fn devices() -> MutexGuard<'static, Vec<(i32, Shared<Loaded>)>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context's part in what is loaded. The last one that is dropped unloads it.
pub(crate) struct Held {
    loaded: ManuallyDrop<Shared<Loaded>>,
}

impl Held {
    /// What a context of the process has loaded on the device, or else loaded now. Contexts that are
    /// made at the same time wait for one another.
    ///
    /// # Errors
    /// No driver, no such device, no image that fits it, or the driver refuses.
    pub fn on_device(op: &'static str, ordinal: i32) -> Result<Held> {
        let mut devices = devices();
        let known = devices.iter().find(|(device, _)| *device == ordinal);
        if let Some((_, loaded)) = known {
            return Ok(Held::of(loaded.clone()));
        }
        let loaded = Shared::new(op, Loaded::load(op, ordinal)?)?;
        push(op, &mut devices, (ordinal, loaded.clone()))?;
        Ok(Held::of(loaded))
    }

    /// One that other contexts of the device do not share.
    #[cfg(test)]
    pub fn alone(op: &'static str, loaded: Loaded) -> Result<Held> {
        Ok(Held::of(Shared::new(op, loaded)?))
    }

    fn of(loaded: Shared<Loaded>) -> Held {
        let loaded = ManuallyDrop::new(loaded);
        Held { loaded }
    }
}

impl Deref for Held {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.loaded
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Contexts that are made meanwhile wait, and load anew if this was the last.
        let mut devices = devices();
        // SAFETY: dropped here alone, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.loaded) };
        devices.retain(|(_, loaded)| !loaded.is_alone());
    }
}

impl Loaded {
    /// Loads every image that fits the device.
    pub fn load(op: &'static str, ordinal: i32) -> Result<Loaded> {
        let start = std::time::Instant::now();
        let driver = Driver::get(op)?;
        check_ordinal(op, driver, ordinal)?;
        let ((major, minor), (needed, _)) = (driver.version, images::TOOLKIT);
        if major < needed {
            let reason = text!(
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
