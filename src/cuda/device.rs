//! A device's primary context, and the images that are loaded there.

use std::ffi::c_int;

use super::driver::{
    CUcontext, CUdevice, CUdevice_attribute, CUfunction, CUfunction_attribute, CUmodule, CUresult,
    Driver,
};
use super::images::{self, Arguments, IMAGES, Image, KernelInfo};
use super::tuning::{Properties, Tuning};
use crate::alloc::push;
use crate::error::{Error, Result, text};

/// A device's primary context, retained.
#[derive(Debug)]
pub(super) struct Primary {
    pub driver: &'static Driver,
    pub device: CUdevice,
    pub context: CUcontext,
}

impl Primary {
    pub fn retain(op: &'static str, driver: &'static Driver, ordinal: i32) -> Result<Primary> {
        let mut device = 0;
        let mut context = std::ptr::null_mut();
        // SAFETY: both are valid for writes; the driver checks the ordinal.
        unsafe {
            driver.device_get(op, &mut device, ordinal)?;
            driver.primary_retain(op, &mut context, device)?;
        }
        Ok(Primary {
            driver,
            device,
            context,
        })
    }

    /// Makes the context current until the guard is dropped.
    pub fn enter(&self, op: &'static str) -> Result<Entered> {
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` is valid for a write; the context is retained.
        unsafe {
            self.driver.current(op, &mut current)?;
            if current == self.context {
                return Ok(Entered { pushed: None });
            }
            self.driver.push(op, self.context)?;
        }
        Ok(Entered {
            pushed: Some(self.driver),
        })
    }

    pub fn attribute(&self, op: &'static str, attribute: CUdevice_attribute) -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: `value` is valid for a write; the device came from the driver.
        unsafe {
            self.driver
                .device_attribute(op, &mut value, attribute, self.device)
        }?;
        Ok(value.unsigned_abs())
    }

    /// What tells this device from others.
    pub fn properties(&self, op: &'static str) -> Result<Properties> {
        use CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH as BUS_BITS,
            CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE as MEMORY_KHZ,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
        };
        let of = |attribute| self.attribute(op, attribute).map(|value| value as usize);
        // Two transfers a clock.
        let bits_per_ms = (2 * of(MEMORY_KHZ)?).saturating_mul(of(BUS_BITS)?);
        Ok(Properties {
            capability: self.capability(op)?,
            multiprocessors: of(MULTIPROCESSORS)?,
            bandwidth: bits_per_ms / 8 / 1000,
        })
    }

    pub fn capability(&self, op: &'static str) -> Result<(u32, u32)> {
        use CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        Ok((self.attribute(op, MAJOR)?, self.attribute(op, MINOR)?))
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained when it was made. At process exit the driver may have gone, which is no error here.
        let _ = unsafe { self.driver.primary_release("context", self.device) };
    }
}

/// While it lives, the calling thread's current context is the backend's; then again what it was.
#[must_use]
pub(super) struct Entered {
    pushed: Option<&'static Driver>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(driver) = self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: `enter` pushed on this thread.
            let _ = unsafe { driver.pop("context", &mut popped) };
        }
    }
}

/// A kernel, loaded, with the type of its arguments.
pub(crate) struct Kernel<A: Arguments> {
    pub function: CUfunction,
    pub info: &'static KernelInfo,
    /// What tells it from its siblings.
    pub choices: &'static A::Choices,
    /// Dynamic shared memory that a block may have, in bytes: as much as it asks for, or as there is.
    pub room: u32,
}

/// The images that are loaded on a device; unloaded when dropped.
pub(crate) struct Resources {
    op: &'static str,
    ordinal: i32,
    /// NULL for an image that is for other devices.
    modules: Vec<CUmodule>,
    /// Whether kernels are started before the one before them has ended, and wait for it themselves.
    pub(super) launches_early: bool,
    /// What launches choose on this device.
    pub(super) tuning: Tuning,
    pub(super) primary: Primary,
}

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the default stream, nor that for it.
pub(super) const NON_BLOCKING: u32 = 1;

impl Resources {
    /// Takes the device's primary context and loads every image.
    pub fn load(op: &'static str, driver: &'static Driver, ordinal: i32) -> Result<Resources> {
        let primary = Primary::retain(op, driver, ordinal)?;
        let mut resources = Resources {
            op,
            ordinal,
            modules: Vec::new(),
            launches_early: false,
            tuning: Tuning::of(&primary.properties(op)?),
            primary,
        };
        let entered = resources.primary.enter(op)?;
        let capability = resources.primary.capability(op)?;
        if !images::fit(capability) {
            return Err(resources.unsupported(capability));
        }
        resources.launches_early = driver.launches_early() && images::wait(capability);
        for image in &IMAGES {
            let module = match image.capability {
                Some(needed) if needed != capability => std::ptr::null_mut(),
                _ => resources.module(image)?,
            };
            push(op, &mut resources.modules, module)?;
        }
        drop(entered);
        Ok(resources)
    }

    fn module(&self, image: &Image) -> Result<CUmodule> {
        let mut module = std::ptr::null_mut();
        let bytes = image.fatbin.0.as_ptr().cast();
        // SAFETY: `module` is valid for a write, the image is a whole fatbin, and a context is current.
        let loaded = unsafe { self.primary.driver.module_load(self.op, &mut module, bytes) };
        match loaded {
            Ok(()) => Ok(module),
            Err(Error::Cuda { code, .. }) if NO_IMAGE.contains(&code) => {
                Err(self.unsupported(self.primary.capability(self.op)?))
            }
            Err(error) => Err(error),
        }
    }

    fn unsupported(&self, (major, minor): (u32, u32)) -> Error {
        Error::UnsupportedDevice {
            op: self.op,
            device: self.ordinal,
            problem: text!(
                "has compute capability {major}.{minor}, this build has kernels for {}",
                images::CAPABILITIES
            ),
        }
    }

    /// Every kernel that takes these arguments; none where its images are for other devices.
    pub fn kernels<A: Arguments>(&self) -> Result<Vec<Kernel<A>>> {
        let _entered = self.primary.enter(self.op)?;
        let images = IMAGES[A::IMAGES].iter().zip(&self.modules[A::IMAGES]);
        let all =
            images.flat_map(|(image, module)| image.kernels.iter().map(|info| (*module, info)));
        let mut kernels = Vec::new();
        for ((module, info), choices) in all.zip(A::CHOICES) {
            if !module.is_null() {
                push(self.op, &mut kernels, self.kernel(module, info, choices)?)?;
            }
        }
        Ok(kernels)
    }

    fn kernel<A: Arguments>(
        &self,
        module: CUmodule,
        info: &'static KernelInfo,
        choices: &'static A::Choices,
    ) -> Result<Kernel<A>> {
        /// What a block may have without asking for more.
        const DEFAULT_SHARED: u32 = 48 << 10;
        let driver = self.primary.driver;
        let mut function = std::ptr::null_mut();
        let mut room = info.shared_bytes;
        if room > DEFAULT_SHARED {
            let most = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
            room = room.min(self.primary.attribute(self.op, most)?);
        }
        // SAFETY: `function` is valid for a write, the module is loaded, its context current, and the name NUL-terminated.
        unsafe {
            driver.module_function(self.op, &mut function, module, info.name.as_ptr())?;
            driver.load(self.op, function)?;
            if room > DEFAULT_SHARED {
                let attribute =
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                driver.function_set_attribute(self.op, function, attribute, room as c_int)?;
            }
        }
        Ok(Kernel {
            function,
            info,
            choices,
            room,
        })
    }

    /// Blocks of a kernel that the device runs at once.
    pub fn resident_blocks<A: Arguments>(&self, kernel: &Kernel<A>) -> Result<usize> {
        let primary = &self.primary;
        let threads = kernel.info.block.iter().product::<u32>() as c_int;
        let shared_bytes = kernel.info.shared_bytes as usize;
        let mut blocks: c_int = 0;
        let _entered = primary.enter(self.op)?;
        // SAFETY: valid for a write; the function is of the current context.
        unsafe {
            primary
                .driver
                .occupancy(self.op, &mut blocks, kernel.function, threads, shared_bytes)
        }?;
        let units = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(blocks.unsigned_abs() as usize * primary.attribute(self.op, units)? as usize)
    }

    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Images that are for this device.
    pub fn num_images(&self) -> usize {
        self.modules.iter().filter(|m| !m.is_null()).count()
    }
}

impl Drop for Resources {
    fn drop(&mut self) {
        let Ok(_entered) = self.primary.enter(self.op) else {
            return;
        };
        let driver = self.primary.driver;
        // SAFETY: made by `load`, and unused from here on. At process exit the driver may have gone, which is no error here.
        unsafe {
            for module in self.modules.iter().filter(|module| !module.is_null()) {
                let _ = driver.module_unload(self.op, *module);
            }
        }
    }
}

/// No machine code fits the device, and the PTX is too new for it or for the driver.
const NO_IMAGE: [c_int; 3] = [
    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as c_int,
    CUresult::CUDA_ERROR_INVALID_PTX as c_int,
    CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as c_int,
];
