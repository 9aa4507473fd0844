//! What is made of the text that CubeCL writes: the same for the same kernel, and one file for many.

use super::Kernel;

/// Parts the includes from the rest, and sorts what CubeCL writes in no particular order, vector types and declarations of
/// variables: the same kernel gives the same text.
pub(super) fn split(source: &str) -> (Vec<String>, String) {
    let mut includes = Vec::new();
    let mut types = Vec::new();
    let mut variables: Vec<&str> = Vec::new();
    let mut text = String::new();
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        if line.contains(" l_mut_") && line.ends_with(';') && line.split(' ').count() == 2 {
            variables.push(line);
            continue;
        }
        variables.sort_unstable();
        for variable in variables.drain(..) {
            text.push_str(variable);
            text.push('\n');
        }
        if line.starts_with("#include") {
            includes.push(line.to_string());
        } else if line.starts_with("struct __align__") {
            let mut definition = line.to_string();
            for line in lines.by_ref() {
                definition.push('\n');
                definition.push_str(line);
                if line == "};" {
                    break;
                }
            }
            types.push(definition);
        } else if line.starts_with("struct info_st") {
            types.sort();
            for definition in types.drain(..) {
                text.push_str(&definition);
                text.push('\n');
            }
            text.push_str(line);
            text.push('\n');
        } else {
            // Array lengths, which only checked kernels read.
            let kept = line.split("uint64 static_meta[").next().unwrap_or(line);
            text.push_str(kept);
            text.push('\n');
        }
    }
    (includes, text)
}

/// Turns the last pointer of a kernel, number `index`, into an array in the parameters. CubeCL has no such parameter; in the text it
/// is a change of the signature alone. The compiler does not get to see where the pointer leads: it would read the constant bank, which
/// serves the lanes of a warp one by one where each wants another element.
pub(super) fn pass_by_value(text: &str, index: usize, len: usize) -> Option<String> {
    let scalars = "const __grid_constant__ info_st info";
    let pointer = format!(", const float* __restrict__ buffer_{index}, {scalars}\n) {{\n");
    let array = format!(
        ", {scalars}, const __grid_constant__ array_st array\n) {{\nconst float* buffer_{index} = array.values;\nasm(\"\" : \"+l\"(buffer_{index}));\n"
    );
    let (before, after) = text.split_once(&pointer)?;
    let (types, signature) = before.split_once("extern \"C\" __global__")?;
    Some(format!(
        "{types}struct array_st {{\n    float values[{len}];\n}};\nextern \"C\" __global__{signature}{array}{after}"
    ))
}

/// Lets the kernel behind be started.
const START_NEXT_KERNEL: &str = "asm volatile(\"griddepcontrol.launch_dependents;\");\n";

/// Waits for the kernel before: as `kernels/cuda/common/dependent_launch.cuh`.
const AWAIT_PREVIOUS_KERNEL: &str = "asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n";

/// The comment of a kernel that waits somewhere else than where it begins: `comment!` in each of its ways.
const AWAITS_HERE: &str = "// await the kernel before\n";

/// Lets a kernel wait for the one before it in the stream, which may still run when it is started: where it begins, or where it says.
pub(super) fn await_previous_kernel(text: &str) -> Option<String> {
    let hopper = |lines: &str| format!("#if __CUDA_ARCH__ >= 900\n{lines}#endif\n");
    let begins = text.find("extern \"C\" __global__")?;
    let (types, kernel) = text.split_at(begins);
    let (signature, body) = kernel.split_once("\n) {\n")?;
    let (first, body) = match body.contains(AWAITS_HERE) {
        true => (
            hopper(START_NEXT_KERNEL),
            body.replace(AWAITS_HERE, &hopper(AWAIT_PREVIOUS_KERNEL)),
        ),
        false => (
            hopper(&format!("{START_NEXT_KERNEL}{AWAIT_PREVIOUS_KERNEL}")),
            body.to_owned(),
        ),
    };
    Some(format!("{types}{signature}\n) {{\n{first}{body}"))
}

/// Takes from a kernel what lets the next one start early: that starts once all blocks of this one have ended.
pub fn start_none_early(kernel: &mut Kernel) {
    kernel.text = kernel.text.replacen(START_NEXT_KERNEL, "", 1);
}

/// One translation unit of several kernels. Each has a namespace, for CubeCL gives helper types of different kernels one name.
pub fn translation_unit(kernels: &[Kernel]) -> String {
    let mut includes: Vec<&str> = kernels
        .iter()
        .flat_map(|kernel| kernel.includes.iter().map(String::as_str))
        .collect();
    includes.sort_unstable();
    includes.dedup();
    let mut unit = includes.join("\n");
    unit.push('\n');
    for kernel in kernels {
        unit.push_str(&format!(
            "\nnamespace ns_{0} {{\n{1}}} // namespace ns_{0}\n",
            kernel.name, kernel.text
        ));
    }
    unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_await_the_one_before() {
        let text = "struct info_st {\n};\nextern \"C\" __global__ void k (\n    float* buffer_0\n) {\nbody";
        let waiting = await_previous_kernel(text).unwrap();
        let first =
            format!("#if __CUDA_ARCH__ >= 900\n{START_NEXT_KERNEL}{AWAIT_PREVIOUS_KERNEL}#endif\n");
        let (before, after) = waiting.split_once(&first).unwrap();
        assert_eq!(format!("{before}{after}"), text);
        assert!(before.ends_with("buffer_0\n) {\n"));
        assert!(await_previous_kernel("void k() {\n}").is_none());

        let waiting = await_previous_kernel(&format!("{text}\n{AWAITS_HERE}more")).unwrap();
        let (before, after) = waiting.split_once("body").unwrap();
        assert!(before.contains(START_NEXT_KERNEL) && !before.contains(AWAIT_PREVIOUS_KERNEL));
        assert!(after.contains(AWAIT_PREVIOUS_KERNEL) && !after.contains("//"));
    }

    #[test]
    fn the_last_pointer_becomes_an_array() {
        let text = "struct info_st {\n};\nextern \"C\" __global__ void k (\n    float* buffer_0, const float* __restrict__ buffer_1, \
                    const __grid_constant__ info_st info\n) {\nbody";
        assert_eq!(
            pass_by_value(text, 1, 8).unwrap(),
            "struct info_st {\n};\nstruct array_st {\n    float values[8];\n};\nextern \"C\" __global__ void k (\n    float* buffer_0, \
             const __grid_constant__ info_st info, const __grid_constant__ array_st array\n) {\n\
             const float* buffer_1 = array.values;\nasm(\"\" : \"+l\"(buffer_1));\nbody"
        );
        assert!(pass_by_value(text, 0, 8).is_none());
    }
}
