//! The macro that declares the kernels of all levels.

/// Declares `Kernels` with one method per kernel, and one table per level. Each table entry is an
/// instantiation of the generic function of the same name inside a function that enables the level's
/// features, with the level's proof for those marked `[simd]`; entries listed after `with` are hand-written.
macro_rules! declare_kernels {
    (
        levels { $(
            $(#[$cfg:meta])*
            $table:ident = $isa:ident in $level:ident uses ($proof:ty, $token:expr)
                $(features $features:literal)? $(with { $($hand:ident: $hand_fn:path),* $(,)? })?;
        )* }
        kernels $list:tt
    ) => {
        declare_kernels!(@api $list);
        $(
            $(#[$cfg])*
            pub(super) const $table: Kernels = {
                #[allow(unused_mut)]
                let mut table = declare_kernels!(@table $level, $isa, $list);
                $($(table.$hand = $hand_fn;)*)?
                table
            };
            $(#[$cfg])*
            mod $level {
                use super::*;

                #[inline]
                $(#[target_feature(enable = $features)])?
                fn simd() -> $proof {
                    $token
                }

                declare_kernels!(@instances [$(#[target_feature(enable = $features)])?] $list);
            }
        )*
    };
    (@api { $(
        $(#[$doc:meta])* fn $name:ident $([$simd:ident])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;
    )* }) => {
        /// Kernels of one instruction-set level. The crate documentation states which results are identical between
        /// levels.
        #[derive(Clone, Copy, Debug)]
        pub struct Kernels {
            pub(super) isa: Isa,
            pub(super) bf16_dot: bool,
            $(pub(super) $name: unsafe fn($($ty),*) $(-> $ret)?,)*
        }

        impl Kernels {
            $(
                $(#[$doc])*
                #[inline]
                pub fn $name(&self, $($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: a table entry only requires that the processor has the features of `self.isa` (and the
                    // operating system's permission), and AVX-512 BF16 if `self.bf16_dot`; `Kernels::new` and
                    // `with_bf16_dot`, the only sources of a `Kernels`, have checked that. Contracts are asserted
                    // inside.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
    (@table $level:ident, $isa:ident, { $(
        $(#[$doc:meta])* fn $name:ident $([$simd:ident])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;
    )* }) => {
        Kernels { isa: Isa::$isa, bf16_dot: false, $($name: $level::$name,)* }
    };
    (@instances [] { $(
        $(#[$doc:meta])* fn $name:ident $([$simd:ident])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;
    )* }) => {
        $(pub(super) fn $name($($arg: $ty),*) $(-> $ret)? {
            generic::$name($($simd(),)? $($arg),*)
        })*
    };
    (@instances [#[$feature:meta]] { $(
        $(#[$doc:meta])* fn $name:ident $([$simd:ident])? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;
    )* }) => {
        $(#[$feature]
        pub(super) fn $name($($arg: $ty),*) $(-> $ret)? {
            generic::$name($($simd(),)? $($arg),*)
        })*
    };
}
